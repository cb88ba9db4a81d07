"""Measure this library, its peers and the floors, interleaved in one run (`make bench`)."""
