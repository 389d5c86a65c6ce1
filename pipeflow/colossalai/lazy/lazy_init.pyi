# Written by `make stubs` from the table of the package.
from pipeflow.colossalai.lazy_init import LazyInitContext

__all__ = ["LazyInitContext"]
