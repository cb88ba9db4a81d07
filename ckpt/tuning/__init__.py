"""Find the settings with which a storage is fastest, by saves and loads: `ckpt.tune`."""
