"""What platforms with a submit command of their own share."""
