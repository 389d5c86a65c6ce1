# Written by `make stubs` from the table of the package.
from pipeflow.colossalai.engines import initialize
from pipeflow.colossalai.processes import get_default_parser, launch, launch_from_openmpi, launch_from_slurm, launch_from_torch

__all__ = ["get_default_parser", "initialize", "launch", "launch_from_openmpi", "launch_from_slurm", "launch_from_torch"]
