# Written by `make stubs` from the table of the package.
from pipeflow.colossalai.layers import LAYERS, MODELS
from pipeflow.training import Registry

__all__ = ["LAYERS", "MODELS", "Registry"]
