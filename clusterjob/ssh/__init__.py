"""Hosts that have sshd and nothing of ours: how they are reached, trusted, given the code and asked. The one room for paramiko."""
