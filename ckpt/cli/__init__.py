"""The `ckpt` command: one file a command; the library's modules do the work."""
