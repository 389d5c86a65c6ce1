# Written by `make stubs` from the table of the package.
from pipeflow.colossalai.policies import ShardConfig
from pipeflow.colossalai.sharders import ModelSharder, ShardFormer

__all__ = ["ModelSharder", "ShardConfig", "ShardFormer"]
