"""The node half: code that runs on every machine of a job.

It uses only the standard library; torch is imported only in the forkserver's preload and in the
workers.
"""
