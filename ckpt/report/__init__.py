"""Draw what is in a checkpoint, and how a run went, as one page that needs no network."""
