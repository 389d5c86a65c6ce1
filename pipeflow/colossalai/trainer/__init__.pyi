# Written by `make stubs` from the table of the package.
from pipeflow.colossalai.trainers import Trainer
from pipeflow.colossalai.trainer import hooks

__all__ = ["Trainer", "hooks"]
