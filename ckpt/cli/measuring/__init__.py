"""Commands that measure a storage: what it guarantees, what it gives back, what is fastest there."""
