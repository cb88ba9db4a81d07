"""Keep a checkpoint whole: commit protocol, bounded waiting for visibility, checksums."""
