"""Rendezvous of agents: each holds one authenticated connection to node 0's coordinator."""
