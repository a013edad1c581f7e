"""Output of workers and agents: files, events, merging, console."""
