"""ColossalAI's `colossalai.shardformer`: splits any library's models over tensor ranks. For pipelines use `Booster`."""

from __future__ import annotations

from pipeflow.colossalai.shardformer.shard import ModelSharder, ShardConfig, ShardFormer

__all__ = ["ModelSharder", "ShardConfig", "ShardFormer"]
