# Written by `make stubs` from the table of the package.
from pipeflow.colossalai.sharders import ShardFormer

__all__ = ["ShardFormer"]
