# Written by `make stubs` from the table of the package.
from pipeflow.colossalai.policies import ShardConfig

__all__ = ["ShardConfig"]
