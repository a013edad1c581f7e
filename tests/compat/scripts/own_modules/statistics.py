OWN = "own statistics"
