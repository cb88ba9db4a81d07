"""Train a small recommender as Persia does: dense trainers in step, asynchronous embedding servers, one checkpoint."""
