"""The agent of one node: its connection to the coordinator, and its workers."""
