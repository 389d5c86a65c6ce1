"""The inner parts of torch.compile, which take long to load. A backend gets only the graph of a forward; these call it
with that of the backward, too.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch

from pipeflow.engine.torch_private import needed

with needed(), warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # torch uses what it deprecates itself
    from torch._dynamo.backends.common import aot_autograd
    from torch._dynamo.backends.debugging import boxed_nop
    from torch._functorch import config as functorch_config
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner


def graph_metadata() -> Any:
    """What AOTAutograd knows of the graph that it compiles now."""
    return torch._guards.TracingContext.get().fw_metadata


__all__ = [
    "aot_autograd",
    "boxed_nop",
    "compile_fx",
    "compile_fx_inner",
    "functorch_config",
    "graph_metadata",
    "min_cut_rematerialization_partition",
]
