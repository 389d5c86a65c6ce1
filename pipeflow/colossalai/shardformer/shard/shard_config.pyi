# Written by `make stubs` from the table of the package.
from pipeflow.colossalai.shard_config import ShardConfig

__all__ = ["ShardConfig"]
