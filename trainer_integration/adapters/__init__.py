"""One file a trainer: each puts this library into a framework that people train with."""
