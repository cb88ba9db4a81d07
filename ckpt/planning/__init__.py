"""Say beforehand what checkpoints cost: bytes, objects, requests, seconds, useful time, money."""
