# Written by `make stubs` from the table of the package.
from pipeflow.megatron.datasets import BlendedMegatronDatasetBuilder

__all__ = ["BlendedMegatronDatasetBuilder"]
