"""Read and write the files of stock PyTorch, without running code that a file brings along.

Each check stops an attack that the others let through:

- `inert_unpickler` and `metadata_reader`, for `.metadata`: a pickle that runs code (its classes and functions
  resolve to stand-ins), takes memory by an opcode, has dict keys of one hash or nested without end, and
  metadata that contradict themselves.
- `item_archive`, for `torch.save` items: zip records that are compressed, overlap, or hide under a second name,
  so that an item needs more memory than its size.
- `pickle_limits`, for the pickle inside an item: `weights_only=True` keeps it from running code, but not from
  asking for memory and time without bound (`bytearray(2**60)`, views larger than their storage, keys of one hash).
- `safe_load`: `weights_only=True` for every object; DCP's planner, which unpickles without it, gets our pickle of
  the result.
- `payload_finder`: only a frame of 4 MiB is read to find a tensor, and the tensor must lie inside its item.
- `extensions`: compressed data that expands beyond the size that it may have.
"""
