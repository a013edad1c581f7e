"""Notifications of a job: node 0's agent reports events, and a child process sends them."""
