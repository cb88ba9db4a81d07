"""The measurements, each a function from a task to its figures. They run in a process of their own."""
