"""What a host does for a submitter who is elsewhere: he logs in, starts this room from the node
zip, and asks it.

The conversation runs over the stdin and stdout of one command: a line of JSON each way, followed by
the bytes that it announces. When stdin ends, the visit is over; what it has started lives on.
"""
