"""The places a job can run at: one folder per backend, the contract in `base`."""
