"""Help tests: real ranks, servers, faults, states."""
