"""The node zip from the inside: its entry point and its importer."""
