"""Save: DCP's StorageWriter, the files of a rank, and the coordinator's commit."""
