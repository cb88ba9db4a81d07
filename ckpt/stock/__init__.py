"""Read and write what stock PyTorch stores, without running code from it."""
