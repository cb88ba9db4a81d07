"""Serve S3 from memory, and drop bodies that are sent, so that the client is the limit."""
