"""The `ckpt` command: one file a command; the work itself is done by the library's modules."""
