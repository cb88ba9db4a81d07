"""Save on the nodes' own disks first, carry to the durable place behind the trainer, restore from the nearest."""
