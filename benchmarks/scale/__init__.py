"""Studies of what a save or a load costs on thousands of ranks."""
