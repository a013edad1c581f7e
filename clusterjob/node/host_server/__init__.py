"""Host server: what a host does for a remote submitter, who starts it over SSH from the node zip.

Requests and answers go over stdin and stdout: one line of JSON, followed by the number of bytes
that it announces. The session ends with stdin; processes that it started run on.
"""
