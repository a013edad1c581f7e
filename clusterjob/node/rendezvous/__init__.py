"""How the agents of a job meet and stay together: one authenticated connection from every agent to
node 0's, the lead.
"""
