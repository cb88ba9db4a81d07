"""Check the commit protocol in a simulated, lying storage."""
