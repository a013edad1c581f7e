OWN = "own secrets"
