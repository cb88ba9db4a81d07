"""Save and restore tables of rows, sharded over processes: bases, deltas of the rows that changed, cuts."""
