"""Save and restore tables of rows, sharded over processes, by what changed in them.

shard = ckpt.embeddings.TableShard("user", rows, shard=rank, shards=world_size)
tables = ckpt.embeddings.Tables(shard)
with shard.writing(ids):
    ...  # change rows
tables.save({"dense": model}, "s3://bucket/run/step-1000")
tables.restore("s3://bucket/run/step-1000")
"""

from ckpt.embeddings.gate import UpdateGate
from ckpt.embeddings.rows import Column, DenseRows, RowStore, home_of
from ckpt.embeddings.saving import Tables
from ckpt.embeddings.shard import TableShard

__all__ = ["Column", "DenseRows", "RowStore", "TableShard", "Tables", "UpdateGate", "home_of"]
