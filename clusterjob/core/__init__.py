"""What a job is, independent of any backend."""
