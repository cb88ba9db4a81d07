"""Open and load: DCP's StorageReader, slices, and coverage of targets."""
