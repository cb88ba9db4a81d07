"""Draw real faults of network, disk and processes from a seed."""
