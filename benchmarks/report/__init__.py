"""Turn results into tables, pictures and the list of targets."""
