"""ColossalAI's `colossalai.shardformer.shard`."""

from __future__ import annotations

from pipeflow.colossalai.shardformer.shard.shard_config import ShardConfig
from pipeflow.colossalai.shardformer.shard.sharder import ModelSharder
from pipeflow.colossalai.shardformer.shard.shardformer import ShardFormer

__all__ = ["ModelSharder", "ShardConfig", "ShardFormer"]
