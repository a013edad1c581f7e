"""What runs inside a worker process: its place, its device, the meeting, the process group, and the
end.
"""
