"""Host server: handle a remote submitter's requests on this host.

The submitter starts the host server over SSH from the node zip. Requests arrive on stdin, and
answers leave on stdout: one line of JSON, then as many bytes as the line announces. The session
ends when stdin ends. Processes that it started continue to run.
"""
