"""The node half: what runs on every machine of a job. Standard library alone; torch only where a
starter warms it.
"""
