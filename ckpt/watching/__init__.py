"""Follow a root: each new durable checkpoint once, in order, and a command for each."""
