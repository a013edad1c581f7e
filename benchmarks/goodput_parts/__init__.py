"""The parts of `benchmarks/goodput.py`: faults, machines, launchers, progress, report."""
