"""Run one training job's saves: decide, upload, keep, restore. Private to the manager."""
