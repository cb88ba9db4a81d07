"""Commands that keep what is stored sound, and small."""
