"""Put samples in an order that any number of ranks can go on with."""
