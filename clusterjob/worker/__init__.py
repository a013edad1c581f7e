"""Run inside each worker process: rank, device, rendezvous of ranks, process group, exit."""
