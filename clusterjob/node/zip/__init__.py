"""Entry point and importer of the node zip."""
