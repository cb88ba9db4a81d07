"""What is stored, checked again and again, and mended from a second place."""
