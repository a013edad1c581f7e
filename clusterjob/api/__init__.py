"""Python functions as jobs: submit, map and spawn."""
