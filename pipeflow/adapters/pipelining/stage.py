"""Stage: torch's PipelineStage, and how the engine calls what is in it, with microbatches that a rank has for itself.
Must not contain: when a stage runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any

import torch.distributed.pipelining.stage as theirs
from torch import Tensor, nn
from torch.distributed.pipelining.stage import PipelineStage

from pipeflow.core.errors import UsageError
from pipeflow.engine.deferral.products import Deferral
from pipeflow.engine.runtime.microbatch import Divided
from pipeflow.engine.runtime.program.slots import snapshot
from pipeflow.engine.torch_private.autograd import at_end_of_backward
from pipeflow.engine.torch_private.pipelining import StageInfo, forward_contexts
from pipeflow.engine.torch_private.trees import tree_leaves

__all__ = ["Own", "PipelineStage", "StageCall"]


INDICES = ("stage_idx", "mb_idx")
"""Keywords of a module that is told its stage and its microbatch."""


class Own(tuple[tuple[Any, ...], dict[str, Any], int]):
    """What a rank has for a microbatch: its arguments, its keywords, and the microbatch's index. The engine does not
    look into it, as it would into a tuple.
    """

    __slots__ = ()


def own_microbatches(args: Sequence[Any], kwargs: Sequence[Any], targets: Sequence[Any] | None) -> Divided:
    """The microbatches of this rank: arguments of its first stage, keywords of each of its stages, targets of its last
    one. The engine looks for leaves of a graph in them if any wants a gradient.
    """
    entries = chain(*args, *(each.values() for each in kwargs))
    kind = tuple if any(map(_wants_gradient, entries)) else Own
    own = [{"own": kind(each)} for each in zip(args, kwargs, range(len(args)), strict=True)]
    return Divided(list(zip(own, [None] * len(args) if targets is None else targets, strict=True)), own=True)


def _wants_gradient(entry: object) -> bool:
    leaves = (entry,) if isinstance(entry, Tensor) else tree_leaves(entry)
    return any(isinstance(each, Tensor) and each.requires_grad for each in leaves)


class StageCall(nn.Module):
    """A stage as the engine calls it: with this rank's arguments in the first stage, and with what the stage before
    returned, a tensor or several, in the others; and with this rank's keywords in each.

    Args:
        stage: the stage.

    Attributes:
        outputs: outputs of the last stage, by microbatch; None to keep none.
        passes_indices: whether the module gets the indices of the stage and of the microbatch as keywords.
    """

    def __init__(self, stage: Any) -> None:
        super().__init__()
        self.module = stage.submod
        self.index, self.is_first, self.is_last = stage.stage_index, stage.is_first, stage.is_last
        self.passes_indices = False
        self._contexts = forward_contexts(stage)
        self.outputs: dict[int, object] | None = None

    def forward(self, *received: object, own: Own) -> object:
        """Calls the module for one microbatch."""
        args, kwargs, microbatch = own
        if self.passes_indices:
            kwargs = {**kwargs, **dict(zip(INDICES, (self.index, microbatch), strict=True))}
        output = self.call(microbatch, args if self.is_first else self.inputs(received), kwargs)
        self.keep(output, microbatch)
        return output

    def call(self, microbatch: int, args: Sequence[Any], kwargs: Mapping[str, Any]) -> object:
        """Calls the module, within the context that was registered for the stage. Raises UsageError if the context
        suppresses an error of the module.
        """
        for make in self._contexts.values():
            with make(StageInfo(stage_index=self.index, microbatch_index=microbatch)):
                return self.module(*args, **kwargs)
            raise UsageError(f"the forward context of stage {self.index} suppressed an error: let it pass")
        return self.module(*args, **kwargs)

    def keep(self, output: object, microbatch: int) -> None:
        """Keeps an output of the last stage, if it was asked for."""
        if self.is_last and self.outputs is not None:
            self.outputs[microbatch] = snapshot(output)

    def inputs(self, received: tuple[Any, ...]) -> tuple[Any, ...]:
        """The arguments of the module, from what the engine passes on."""
        [value] = received
        return tuple(value) if isinstance(value, tuple | list) else (value,)


class BuilderCall(StageCall):
    """A stage with a `dw_builder`: this is called at the end of each backward of the stage, and returns the function
    that computes weight gradients, which W calls.

    Attributes:
        deferral: takes that function; the engine sets it.
    """

    def __init__(self, stage: Any) -> None:
        super().__init__(stage)
        self.builder: Callable[[], Callable[[], None]] = stage.dw_builder
        self.deferral: Deferral | None = None

    def deferred_parameters(self) -> list[nn.Parameter]:
        """The parameters of layers that the function may compute; none are known."""
        return []

    def forward(self, *received: object, own: Own) -> object:
        """Calls the module, and the builder after the backward of its output."""
        output = super().forward(*received, own=own)
        found = [each for each in tree_leaves(output) if isinstance(each, Tensor) and each.requires_grad]
        if found:
            found[0].register_hook(self._await_end)
        return output

    def _await_end(self, _: Tensor) -> None:
        at_end_of_backward(self._build)

    def _build(self) -> None:
        if self.deferral is not None:
            self.deferral.take(((), partial(_added, self.builder())))


def _added(run: Callable[[], None]) -> list[tuple[nn.Parameter, Tensor]]:
    """Calls what a `dw_builder` returned for one microbatch, which adds to gradients itself."""
    run()
    return []


def __getattr__(name: str) -> Any:
    """Other names of torch's module."""
    return getattr(theirs, name)
