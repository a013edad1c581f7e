OWN = "own profile"
