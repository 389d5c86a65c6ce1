"""Past: the keys and values that attention keeps from one slice of a sequence to the next, and their gradients. Must
not contain: attention itself, and where sequences are cut.

Source: Sun et al., arXiv 2406.03488 (a slice of a causal model needs the keys and values of those before it).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional

from pipeflow.core.errors import UsageError
from pipeflow.engine.torch_private.modes import FakeTensor

TOKENS = -2  # the dimension of tokens in (batch, heads, tokens, head size)

# Theory of operation
#
# Keys of all slices of a microbatch lie in one buffer, of which slice s fills its part. Attention of slice s gets the
# buffer up to the end of s. It saves that for its backward, so slices share memory. Later slices write behind it, which
# does not change what was saved; so each slice gets a tensor of its own on the same memory, whose version autograd
# counts apart. Backwards run from the last slice to the first. Each adds what belongs to earlier slices to a buffer of
# gradients, and takes what later ones have added to its own part.


@dataclass(eq=False)
class _Rows:
    """Keys, or values, of one attention layer for the slices of a microbatch: (..., tokens, head size)."""

    values: Tensor | None = None
    gradients: Tensor | None = None

    def put(self, part: Tensor, start: int, total: int) -> Tensor:
        """Adds those of a slice that begins at place `start` of `total`. Returns those of all slices so far."""
        if self.values is None:
            self.values = part.new_empty((*part.shape[:TOKENS], total, part.shape[-1]))
        end = start + part.shape[TOKENS]
        self.values.narrow(TOKENS, start, end - start).copy_(part)
        found = self.values.narrow(TOKENS, 0, end)
        return part.new_empty(0).set_(
            self.values.untyped_storage(), found.storage_offset(), found.shape, found.stride()
        )

    def take(self, gradient: Tensor, start: int) -> Tensor:
        """The gradient of the slice's own part, from that of all tokens so far."""
        own = gradient.narrow(TOKENS, start, gradient.shape[TOKENS] - start)
        earlier = gradient.narrow(TOKENS, 0, start)
        if self.gradients is None:
            self.gradients = earlier.clone()
            return own
        own = own + self.gradients.narrow(TOKENS, start, own.shape[TOKENS])
        self.gradients.narrow(TOKENS, 0, start).add_(earlier)
        return own


class _Join(Function):
    """Those of a slice behind those of earlier ones."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, rows: _Rows, start: int, total: int) -> Tensor:
        ctx.rows, ctx.start = rows, start
        return rows.put(part, start, total)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return ctx.rows.take(gradients[0], ctx.start), None, None, None


@dataclass(eq=False)
class Past:
    """What the slices of one microbatch leave in one stage, for later ones.

    Attributes:
        ends: the end of each slice, in tokens.
        start, end: those of the slice that runs, in tokens.
    """

    ends: Sequence[int]
    start: int = 0
    end: int = 0
    _rows: dict[nn.Module, list[_Rows]] = field(default_factory=dict, init=False)
    _called: set[nn.Module] = field(default_factory=set, init=False)  # by the slice that runs

    def joined(self, layer: nn.Module, parts: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The parts of the slice that runs, behind those of `layer` for earlier slices. Each slice may have a share of
        its tokens alone, those of a context rank.
        """
        tokens, share = self.end - self.start, parts[0].shape[TOKENS]
        start, total = (place * share // tokens for place in (self.start, self.ends[-1]))
        if isinstance(parts[0], FakeTensor):  # a module is planned for the shapes of this slice
            return tuple(functional.pad(part, (0, 0, start, 0)) for part in parts)
        if layer in self._called:
            raise UsageError(
                f"{type(layer).__name__} computes attention twice in a stage, so it is not known which keys of earlier "
                "slices it needs: use a schedule with slices=1"
            )
        self._called.add(layer)
        rows = self._rows.setdefault(layer, [_Rows() for _ in parts])
        join: Any = _Join.apply
        return tuple(join(part, each, start, total) for part, each in zip(parts, rows, strict=True))


class Slices:
    """The slices of a stage: what those of each microbatch leave for later ones, and which of them runs now.

    Attributes:
        pasts: per microbatch of the step; empty if microbatches are whole.
        current: of the slice that runs.
    """

    def __init__(self) -> None:
        self.pasts: list[Past] = []
        self.current: Past | None = None

    def load(self, module: nn.Module, cuts: Sequence[Sequence[int]]) -> None:
        """Begins a step. `cuts` has the ends of the slices of each microbatch, in tokens."""
        self.pasts = [Past(ends) for ends in cuts]
        for each in module.modules() if cuts else ():
            vars(each)[_PLACE] = self  # not in a variable of the thread: a GPU's backward runs on another one

    @contextmanager
    def at(self, microbatch: int, number: int, *, last: int | None = None) -> Iterator[None]:
        """A region in which slice `number` of a microbatch runs; if it is the `last` one, its keys and values are
        dropped at the end.
        """
        self.current = past = self.pasts[microbatch]
        past.start, past.end, past._called = past.ends[number - 1] if number else 0, past.ends[number], set()
        try:
            yield
        finally:
            self.current = None
        if number == last:
            past._rows = {}


_PLACE = "_pipeflow_slices"


def _current(layer: nn.Module) -> Past | None:
    slices = vars(layer).get(_PLACE)
    return None if slices is None else slices.current


def is_sliced(layer: nn.Module) -> bool:
    """Whether the stage of `layer` runs a slice of a microbatch now, not a whole one."""
    return _current(layer) is not None


def tokens_before(layer: nn.Module) -> int:
    """How many tokens of its sequence lie before the slice that the stage of `layer` runs; 0 for whole microbatches."""
    past = _current(layer)
    return 0 if past is None else past.start


def joined(layer: nn.Module, *parts: Tensor) -> tuple[Tensor, ...]:
    """Keys and values of the slice that runs, behind those that `layer` had for earlier slices of its microbatch. Those
    of a whole microbatch are returned as they are.

    Args:
        layer: the attention layer, which calls this once per forward.
        parts: tensors of shape (..., tokens, head size).

    Raises UsageError if a layer calls it twice in a forward.
    """
    past = _current(layer)
    return parts if past is None else past.joined(layer, parts)
