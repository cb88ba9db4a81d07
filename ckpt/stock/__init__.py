"""Read and write the files of stock PyTorch, without running code that a file brings along.

Each check stops an attack that the others let through:

- `inert_unpickler`, `metadata_reader`: a `.metadata` that runs code, takes memory by an opcode, has
  dict keys of one hash or nested without end, or contradicts itself.
- `item_archive`: zip records that are compressed, overlap, or hide under a second name.
- `pickle_limits`: an item that asks for memory or time without bound, which `weights_only` allows.
- `safe_load`: `weights_only=True` for every object; DCP's planner gets our pickle of the result.
- `standard_values`, `numpy_values`, `stand_ins`: plain values made by functions that check what they are given.
- `payload_finder`: a tensor that does not lie inside its item.
- `extensions`: compressed data that expands beyond the size that it may have.
"""
