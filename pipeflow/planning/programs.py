"""Programs: what differs between training programs in the work of a step. Must not contain: what they keep in memory
(`planning/engines.py`), or times.
"""

from __future__ import annotations

from pipeflow.planning.engines import engine_named
from pipeflow.planning.setup import Setup

TITANS = ("torchtitan", "torchtitan-compiled")


def is_plain(setup: Setup) -> bool:
    """Whether checkpoints and the loss are those of plain PyTorch, as in torchtitan. Unless `engine` says it, they are,
    but in fp16 and where gradients are added up in float32, as in Megatron-LM.
    """
    if setup.engine is not None:
        return setup.engine in TITANS
    return setup.precision.products != "fp16" and setup.precision.gradient <= setup.precision.weight


def stops_early(setup: Setup) -> bool:
    """Whether a layer is recomputed only up to the input of its last product, the last that its backward needs. So does
    torch.utils.checkpoint since torch 2.1 (`set_checkpoint_early_stop`), but for `use_reentrant=True`.
    """
    return is_plain(setup) if setup.early_stop is None else setup.early_stop


def reduced_gradient(setup: Setup) -> int:
    """Bytes of a divided gradient while it is reduced: in torchtitan float32 (`mixed_precision_reduce`)."""
    gradient = setup.precision.gradient
    return 4 if gradient and engine_named(setup.engine).float32_sums else gradient
