"""Read and write the files of stock PyTorch, without running code that a file brings along.

`metadata_reader` decodes `.metadata` into inert stand-ins. `torch.save` items are checked
(`item_archive`, `pickle_limits`) before torch loads them with `weights_only=True` (`safe_load`,
`payload_finder`).
"""
