"""LayerRandom: random numbers of this rank's layers. Those of the script are apart, and the same on all ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from pipeflow.parallel.context import Context


class LayerRandom:
    """States of torch's generators for the layers of this rank: alike on tensor ranks, and others in each pipeline rank
    and each replica. They begin with the seed of the script, whose own random numbers stay untouched, so that all ranks
    of a pipeline read the same batches.

    Args:
        context: the context of this rank.
    """

    def __init__(self, context: Context) -> None:
        self._is_on_gpu = context.device.type == "cuda"
        outside = self._states()
        rank = context.pipeline_rank + context.pipeline_size * context.data_rank
        torch.manual_seed((torch.initial_seed() + 1024 * rank) % 2**63)
        self._inside = self._states()
        self._restore(outside)

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Inside the `with` block, torch's random numbers come from these states."""
        outside = self._states()
        self._restore(self._inside)
        try:
            yield
        finally:
            self._inside = self._states()
            self._restore(outside)

    def _states(self) -> list[Tensor]:
        return [torch.get_rng_state(), *([torch.cuda.get_rng_state()] if self._is_on_gpu else [])]

    def _restore(self, states: list[Tensor]) -> None:
        torch.set_rng_state(states[0])
        if self._is_on_gpu:
            torch.cuda.set_rng_state(states[1])
