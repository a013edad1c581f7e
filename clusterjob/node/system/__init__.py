"""The machine below a node: processes, network, devices, files, signals."""
