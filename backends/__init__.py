"""Storage systems, one file each, behind the small contract of `ckpt.backends.base`."""
