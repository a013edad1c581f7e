"""Backends: one folder per backend, with the contract and the registry in `base`."""
