"""Models as safetensors files, which all ranks write together."""
