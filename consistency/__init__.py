"""What keeps a checkpoint whole: commit protocol, bounded waiting for visibility, digests."""
