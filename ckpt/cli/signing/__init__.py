"""Commands about signatures."""
