# Written by `make stubs` from the table of the package.
from pipeflow.megatron.datasets import GPTDatasetConfig, MockGPTDataset

__all__ = ["GPTDatasetConfig", "MockGPTDataset"]
