"""Host server: handle a remote submitter's requests on this host.

The submitter starts it over SSH from the node zip. Requests and answers go over stdin and stdout:
one line of JSON, followed by the number of bytes that the line announces. The session ends when
stdin ends; processes that it started run on.
"""
