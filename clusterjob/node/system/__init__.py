"""Access one machine: processes, network, devices, files, signals."""
