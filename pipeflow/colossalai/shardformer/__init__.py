"""ColossalAI's `colossalai.shardformer`: models of any library over tensor ranks. Pipelines of them are run by a
`Booster`.
"""

from __future__ import annotations

from pipeflow.colossalai.shardformer.shard import ModelSharder, ShardConfig, ShardFormer

__all__ = ["ModelSharder", "ShardConfig", "ShardFormer"]
