# Written by `make stubs` from the table of the package.
from pipeflow.colossalai.plugins import GeminiPlugin, HybridParallelPlugin, LowLevelZeroPlugin, TorchDDPPlugin

__all__ = ["GeminiPlugin", "HybridParallelPlugin", "LowLevelZeroPlugin", "TorchDDPPlugin"]
