"""Let ranks agree, miss each other, and give up in time."""
