"""Random numbers of a tensor rank. All ranks of a group share one stream, for tensors that are the same on all of them.
Each rank also has its own stream, for tensors that are split. Both use explicit generators, because ranks may be
threads. Dropout draws from them, activation checkpointing replays them, and initial values are drawn block by block, so
that they do not depend on the tensor size.
"""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from math import prod
from typing import Any, Self

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional
from torch.utils import checkpoint as torch_checkpoint

from pipeflow.core.errors import UsageError
from pipeflow.engine.deferral.past import tokens_before
from pipeflow.engine.parallel.context import context_if_launched, keep, keeping, kept
from pipeflow.engine.parallel.sharding import Split, expert_splits_of, own_tokens
from pipeflow.engine.parallel.transport.protocol import Group
from pipeflow.engine.tensor.layer import TensorLayer, whole_shape
from pipeflow.engine.torch_private.autograd import backward_id
from pipeflow.engine.torch_private.tensors import default_states, disable_dynamo, set_default_states


class RandomTracker:
    """The two random generators of one rank.

    Args:
        seed: seed, the same on every rank; replicas and pipeline ranks draw different numbers from it.
        device: device of the generators, which must be that of the activations.
        place: this rank's (replica, pipeline, tensor) indices. Context ranks have one place, since they draw the
            numbers of all of them. Each tensor rank of a grid with other samples counts as one more replica.

    Attributes:
        shared: generator that draws the same numbers on all tensor ranks with the same samples.
        own: generator that draws different numbers on each rank.
        is_replay: True if it replays numbers that another tracker drew before.
    """

    is_replay = False

    def __init__(
        self, seed: int, *, device: torch.device | str = "cpu", place: tuple[int, int, int] = (0, 0, 0)
    ) -> None:
        replica, pipeline, tensor = place
        self.shared = _generator(device, seed, "shared", replica, pipeline)
        self.own = _generator(device, seed, "own", replica, pipeline, tensor)

    def get_state(self) -> dict[str, Tensor]:
        """The states of both generators as byte tensors, for a checkpoint of this rank."""
        return {"shared": self.shared.get_state(), "own": self.own.get_state()}

    def set_state(self, state: dict[str, Tensor]) -> None:
        """Restores a state from `get_state`. Raises UsageError for anything else."""
        if state.keys() != {"shared", "own"}:
            raise UsageError(f"the state of a RandomTracker must have the entries own and shared, got {sorted(state)}")
        self.shared.set_state(state["shared"])
        self.own.set_state(state["own"])

    def rewound(self, state: dict[str, Tensor]) -> AbstractContextManager[None]:
        """Returns a context manager: inside it, the thread that entered draws from `state` on. Other threads, and this
        tracker, are not affected.
        """
        return keeping(_KEY, lambda: _Replay(self, state))


class _Replay(RandomTracker):
    """Replays the generators of another tracker from a given state."""

    is_replay = True

    def __init__(self, tracker: RandomTracker, state: dict[str, Tensor]) -> None:
        self.shared, self.own = Generator(tracker.shared.device), Generator(tracker.own.device)
        self.set_state(state)


_KEY = "random tracker"


def manual_seed(seed: int) -> RandomTracker:
    """Makes and returns the current RandomTracker for this rank's place in the context, or for a world of one without a
    launch. Every rank calls it with the same seed, before dropout is first used.
    """
    tracker = RandomTracker(seed)
    if (context := context_if_launched()) is not None:
        replica = context.losses.rank // context.context_size
        place = (replica, context.pipeline_rank, context.tensor_rank)
        tracker = RandomTracker(seed, device=context.device, place=place)
    set_tracker(tracker)
    return tracker


def set_tracker(tracker: RandomTracker) -> None:
    """Sets the current tracker for all threads of this rank. Use it for places that the context does not know."""
    keep(_KEY, tracker)


def current_tracker() -> RandomTracker | None:
    """The current tracker of this rank, or None. Raises UsageError on a thread that is no rank."""
    tracker: RandomTracker | None = kept(_KEY)
    return tracker


def share_default_state(group: Group, device: torch.device) -> None:
    """Sets torch's default generators, from which stock dropout draws, to the state on the group's first rank.

    Tensors that are the same on all ranks must get the same masks. From then on all ranks draw equally many numbers,
    because split tensors have equal parts.
    """
    if group.size == 1:
        return
    gpus = [device] if device.type == "cuda" else []
    states = [state.to(device) for state in default_states(gpus)]
    for state in states:
        group.broadcast(state, 0).wait()
    set_default_states([state.cpu() for state in states], gpus)


def _generator(device: torch.device | str, *what: object) -> Generator:
    return Generator(device).manual_seed(_seed_of(*what))


Factors = Callable[[Tensor, Tensor], Tensor]
"""The factors of dropout for the scores of some queries and all keys up to the last of them."""


class Dropout(TensorLayer):
    """nn.Dropout with a mask that is the same on every tensor rank, or with its own mask on each.

    Masks are drawn from the current RandomTracker. Without a tracker, a group of one rank draws from torch's default
    generator. Context ranks draw the numbers of all of them, and each takes those of its tokens. With `tokens`, these
    are the numbers of whole sequences, so masks are those of one context rank.

    Args:
        p, inplace: as in nn.Dropout.
        parallel_input: True if each rank has its part of the input (of the heads, the hidden dimension or the
            sequence), which gets its own mask. False if the input, and so the mask, is the same on every rank. A rank
            of a grid has a part in any case; only a mask of one number per sample is that of all ranks with the sample.
        tokens: the dimension of the tokens that context ranks share. None: the input has no such dimension.
        group: the tensor ranks; by default the tensor group of the context, or a group of one without a launch.

    Raises UsageError in training without `manual_seed` if there are several tensor or context ranks. Also raises it if
    torch's checkpoint recomputes the layer: only `pipeflow.tensor.checkpoint` replays a tracker.
    """

    def __init__(
        self,
        p: float = 0.5,
        inplace: bool = False,
        *,
        parallel_input: bool = False,
        tokens: int | None = None,
        group: Group | None = None,
    ) -> None:
        super().__init__()
        self.join(group)
        if not 0 <= p <= 1:
            raise UsageError(f"{self._get_name()} needs a probability from 0 to 1, got p={p}")
        self.p, self.inplace, self.parallel_input, self.tokens = p, inplace, parallel_input, tokens

    @property
    def compiles(self) -> bool:
        """False if it draws masks, since it uses its own generators."""
        return self.p == 0

    def forward(self, input: Tensor) -> Tensor:
        if not self.training or self.p == 0:
            return input
        context = context_if_launched()
        ranks = 1 if context is None else context.context_size
        if current_tracker() is None and self.group.size == ranks == 1:
            return functional.dropout(input, self.p, inplace=self.inplace)
        if context is None or ranks == 1:
            factors = self.factors(torch.empty_like(input, requires_grad=False))
        elif self.tokens is None:
            factors = self.factors(input.new_empty(ranks, *input.shape))[context.context_rank].clone()
        else:
            shape = [*input.shape]
            shape[self.tokens] *= ranks
            factors = own_tokens(self.factors(input.new_empty(shape)), context.context_rank, ranks, self.tokens)
        return input.mul_(factors) if self.inplace else input * factors

    def of_scores(self, own: Tensor, group: Group) -> Factors | None:
        """The mask of attention's scores over context ranks: drawn for all tokens of a sequence, as one process does.
        None for one context rank, which draws it in a forward.

        Args:
            own: (batch, heads, length, head size): the queries of this rank.
            group: the context ranks.
        """
        if group.size == 1:
            return None
        (batch, heads, tokens, _), ranks, before = own.shape, group.size, tokens_before(self)

        @cache
        def whole() -> Tensor:
            return self.factors(own.new_empty(batch, heads, ranks * tokens, before + ranks * tokens))

        def factors(query: Tensor, key: Tensor) -> Tensor:
            last, some = key.shape[2] - before, query.shape[1]  # the last query sees all keys
            first = group.rank * some if some < heads else 0
            return whole()[:, first : first + some, last - query.shape[2] : last, : key.shape[2]].clone()

        return factors

    def factors(self, whole: Tensor) -> Tensor:
        """Draws the mask of `whole`, an empty tensor, into it: 0, or 1 / (1 - p) for what stays. Raises UsageError as
        the forward does.
        """
        tracker = current_tracker()
        if tracker is None:
            raise UsageError(
                "dropout over several tensor or context ranks needs pipeflow.tensor.manual_seed(seed) first"
            )
        if backward_id() != -1 and not tracker.is_replay:  # inside a backward
            raise UsageError(
                f"{self._get_name()} was recomputed in a backward with another mask than the first: use "
                "pipeflow.tensor.checkpoint, which replays its masks, instead of torch.utils.checkpoint"
            )
        kept = 1 - self.p
        is_part = self.parallel_input or (self.grid is not None and whole.shape[-1] > 1)  # 1: a number for each sample
        whole.bernoulli_(kept, generator=tracker.own if is_part else tracker.shared)
        return whole.div_(kept) if kept else whole

    @classmethod
    def from_native_module(cls, module: nn.Dropout, group: Group | None = None, **options: Any) -> Self:
        """A layer with the options of `module`, which is not changed. `options` are other arguments of this class."""
        cls._require_native(module, nn.Dropout)
        return cls(module.p, module.inplace, group=group, **options).train(module.training)

    def extra_repr(self) -> str:
        return f"p={self.p}, inplace={self.inplace}, parallel_input={self.parallel_input}"


@disable_dynamo  # as torch's own checkpoint is; torch.compiler.disable would import the compiler right here
def checkpoint(function: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
    """Returns `function(*arguments, **keywords)`, and recomputes it in the backward instead of keeping its activations.

    This is torch's non-reentrant checkpoint; in addition, the second forward draws the same numbers from the current
    RandomTracker as the first, on any thread. Collectives of the forward run again, too.

    torch.compile cannot replay those numbers, so it does not compile `function` here: compiled code ends before the
    call and continues after it. With `fullgraph=True`, torch.compile raises an error that names this function.
    """
    tracker = current_tracker()
    if tracker is None:
        return torch_checkpoint.checkpoint(function, *arguments, use_reentrant=False, **keywords)
    state = tracker.get_state()

    def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return nullcontext(), tracker.rewound(state)

    return torch_checkpoint.checkpoint(function, *arguments, use_reentrant=False, context_fn=contexts, **keywords)


def replay_of(what: str, device: torch.device) -> Callable[[], AbstractContextManager[None]]:
    """Remembers the state of the random generators before a forward of `what`, and returns a function that makes a
    region in which the same numbers are drawn. The region raises UsageError at its end if the generators of Python or
    NumPy were used in it.
    """
    devices = [device] if device.type == "cuda" else []
    states = default_states(devices)
    tracker = current_tracker()
    tracked = None if tracker is None else tracker.get_state()

    @contextmanager
    def region() -> Iterator[None]:
        before = _drawn()
        rewound = nullcontext() if tracker is None or tracked is None else tracker.rewound(tracked)
        others = default_states(devices)
        try:
            with rewound:
                set_default_states(states, devices)
                yield
        finally:
            set_default_states(others, devices)
        if _drawn() != before:
            raise UsageError(
                f"{what} draws from the random numbers of Python or NumPy, so its recomputation differs from "
                "its forward: draw from torch, or do not recompute the stage"
            )

    return region


def _drawn() -> tuple[object, ...]:
    """The state of the random generators of Python and NumPy."""
    numpy: Any = sys.modules.get("numpy")
    if numpy is None:
        return (random.getstate(),)
    _, keys, position, *_ = numpy.random.get_state()
    return random.getstate(), keys.tobytes(), position


Draw = Callable[[Tensor], object]
"""Fills a tensor in place with values that do not depend on each other or on its shape."""

Fill = Callable[[str, Tensor, Generator], object]
"""Fills a block of the full parameter of the given name in place, like a Draw, with numbers from the generator."""

_BLOCK = 2**24  # elements
_GRAIN = 16  # torch draws normal numbers in groups of 16, so blocks of whole groups get the numbers of one draw


@torch.no_grad()
def draw_part_(part: Tensor, draw: Draw, *, split: Split | None, rank: int) -> None:
    """Fills `part` with the part of `rank` of a full tensor that `draw` fills. Padding becomes zero; a meta tensor is
    skipped.

    On the CPU, numbers and the final state of the generator are those of one draw of the full tensor. Needs a block of
    64 MiB (of float32) in addition to the part.
    """
    if part.is_meta:
        return
    shape = whole_shape(part, split)
    if shape == tuple(part.shape):
        for start, stop in _row_blocks(shape):
            draw(part[start:stop])
        return
    part.zero_()
    for start, stop in _row_blocks(shape):
        block = part.new_empty(stop - start, *shape[1:])
        draw(block)
        _keep(part, block, start, split, rank)


@torch.no_grad()
def initialize_(module: nn.Module, fill: Fill, *, seed: int, prefix: str = "") -> None:
    """Fills the parameters of `module` with values that depend only on `seed` and on their names, not on the tensor
    size, the device, or earlier draws.

    For layers that were made on the meta device, after `to_empty`. A rank allocates one block in addition to its parts,
    and draws only blocks of which it holds some rows.

    Args:
        module: module to fill; its layers may be of any class.
        fill: called as `fill(name, block, generator)` with a block of rows of the full parameter, on the CPU.
        seed: seed, the same on every rank.
        prefix: name of `module` in the whole model, as in `nn.Module.named_parameters`, so that layers of different
            pipeline stages get different values, which do not depend on the number of stages.
    """
    places = {
        id(layer.get_parameter(name)): (split, layer.group.rank)
        for layer in module.modules()
        if isinstance(layer, TensorLayer)
        for name, split in layer.splits().items()
    }
    context = context_if_launched()
    place = 0 if context is None else context.experts.rank
    places |= {key: (split, place) for key, split in expert_splits_of(module).items()}
    for name, parameter in module.named_parameters(prefix=prefix):
        if not parameter.is_meta:
            _fill_part(torch.atleast_1d(parameter), fill, name, seed, *places.get(id(parameter), (None, 0)))


def _fill_part(part: Tensor, fill: Fill, name: str, seed: int, split: Split | None, rank: int) -> None:
    shape = whole_shape(part, split)
    part.zero_()
    for start, stop in _row_blocks(shape):
        if not _overlap(part, start, stop, split, rank):
            continue
        block = torch.empty(stop - start, *shape[1:], dtype=part.dtype)
        fill(name, block, Generator().manual_seed(_seed_of(seed, name, start)))
        _keep(part, block, start, split, rank)


def _row_blocks(shape: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Start and end of each block of rows of a full tensor. A last block that is too small joins the one before."""
    rows = shape[0]
    step = max(1, _BLOCK // max(1, prod(shape[1:])) // _GRAIN) * _GRAIN
    start = 0
    while start < rows:
        stop = start + step if rows - start - step >= _GRAIN else rows
        yield start, stop
        start = stop


def _overlap(part: Tensor, start: int, stop: int, split: Split | None, rank: int) -> range:
    """The rows of a block that `rank` holds, counted in the full tensor."""
    if split is None or 0 not in split.dims:
        return range(start, stop)
    first = _along(split, 0).place(rank) * len(part)
    return range(max(start, first), min(stop, first + len(part)))


def _along(split: Split, dim: int) -> Split:
    """The split along one of its dimensions."""
    return split if split.dim == dim or split.then is None else _along(split.then, dim)


def _keep(part: Tensor, block: Tensor, start: int, split: Split | None, rank: int) -> None:
    """Copies the entries that belong to the part of `rank` out of a block that starts at row `start` of the full
    tensor.
    """
    rows = _overlap(part, start, start + len(block), split, rank)
    if not rows:
        return
    block = block[rows.start - start : rows.stop - start]
    if split is None:
        part[rows.start : rows.stop] = block
        return
    before = _along(split, 0).place(rank) * len(part) if 0 in split.dims else 0
    own = part[rows.start - before : rows.stop - before]
    for dim in split.dims:
        if dim:
            its, width = _along(split, dim), part.shape[dim]
            begin = min(its.place(rank) * width, block.shape[dim])
            block = block.narrow(dim, begin, min(width, block.shape[dim] - begin))
            own = own.narrow(dim, 0, block.shape[dim])
    own.copy_(block)


def _seed_of(*what: object) -> int:
    digest = hashlib.sha256("/".join(map(str, what)).encode()).digest()
    return int.from_bytes(digest[:7])
