"""Convert between this format, stock DCP, torch.save files and safetensors, streamed."""
