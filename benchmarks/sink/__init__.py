"""An S3 endpoint that drops what it is sent and serves from memory, so that the client is the limit."""
