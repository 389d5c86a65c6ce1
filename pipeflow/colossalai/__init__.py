"""The names of ColossalAI's tutorials: `pipeflow.colossalai.x` replaces `colossalai.x`. Each is one of pipeflow's own
classes or functions, or a thin adapter of it.
"""

from __future__ import annotations

from pipeflow.colossalai.initializing import initialize
from pipeflow.colossalai.launching import (
    launch,
    launch_from_openmpi,
    launch_from_slurm,
    launch_from_torch,
)
from pipeflow.colossalai.parser import get_default_parser

__all__ = [
    "get_default_parser",
    "initialize",
    "launch",
    "launch_from_openmpi",
    "launch_from_slurm",
    "launch_from_torch",
]
