# Written by `make stubs` from the table of the package.
from pipeflow.colossalai.builders import DATASETS, HOOKS, LAYERS, LOSSES, MODELS, OPTIMIZERS
from pipeflow.training import Registry

__all__ = ["DATASETS", "HOOKS", "LAYERS", "LOSSES", "MODELS", "OPTIMIZERS", "Registry"]
