"""Which stored chunks a rank reads, found by columns."""
