"""Move bytes between memory and stores: bodies, ranges, threads, budgets."""
