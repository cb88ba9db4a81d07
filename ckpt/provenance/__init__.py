"""Who made a checkpoint, and whether it is still that one: signatures of commit records."""
