"""Look after checkpoints: one file for each verb of the `ckpt` command."""
