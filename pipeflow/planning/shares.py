"""Shares: the layers that stages hold, what a device has of them, and the tokens of a microbatch. Must not contain:
bytes that are kept, and times.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple, TypeVar

from pipeflow.core.errors import UsageError
from pipeflow.core.partition import Cut, Part, stage_parts
from pipeflow.core.placement import Placement
from pipeflow.planning.blocks import Transformer, near_divisors
from pipeflow.planning.layer_kinds import LayerKind, routed_layers
from pipeflow.planning.scans import require_scan_ranks, require_scan_setup
from pipeflow.planning.setup import Setup

T = TypeVar("T")
ON_THEIR_WAY = 2  # offloaded layers whose values are on the device: one leaves it or comes back while one computes


class Share(NamedTuple):
    """The share of a model that stages hold together: shares that are equal cost the same.

    Attributes:
        layers: the kind of each of its layers, in their order.
        first: whether the part before the layers belongs to it.
        last: whether the part after the layers belongs to it.
    """

    layers: tuple[LayerKind, ...]
    first: bool
    last: bool

    def kinds(self, model: Transformer, setup: Setup) -> list[tuple[int, Transformer, Setup]]:
        """How many of its layers are as those of which model and setup: in the latter, all layers have a checkpoint or
        none has, and all of them are offloaded or none is. The last share also has the layers that predict further
        tokens.
        """
        number = len(self.layers)
        checkpointed = number if setup.checkpoint_layers is None else min(setup.checkpoint_layers, number)
        offloaded = min(max(0, setup.offload_layers - ON_THEIR_WAY), number)
        found: list[tuple[int, Transformer, Setup]] = []
        for start, end in pairwise(sorted({0, checkpointed, offloaded, number})):
            each = setup
            if setup.checkpoint_layers is not None or setup.offload_layers:
                kept = setup.checkpoint if start < checkpointed else "none"
                each = replace(setup, checkpoint=kept, checkpoint_layers=None, offload_layers=int(start < offloaded))
            found += _alike(model, self.layers[start:end], each)
        if self.last:
            each = setup
            if setup.checkpoint_layers is not None or setup.offload_layers:
                each = replace(setup, checkpoint_layers=None, offload_layers=0)
            found += _alike(model, model.further_kinds, each)
        return found


def _alike(model: Transformer, kinds: tuple[LayerKind, ...], setup: Setup) -> list[tuple[int, Transformer, Setup]]:
    """How many of these layers are as those of which model, all with one setup."""
    return [(kinds.count(kind), model.of_kind(kind), setup) for kind in dict.fromkeys(kinds)]


def stage_layers(model: Transformer, placement: Placement, cut: Cut = "uniform") -> list[Part]:
    """Per stage its layers [start, end): by default as even as possible, otherwise by `stage_parts`. With one stage
    more than layers, the last stage has no layers; with two more, the first stage has none either. These stages hold
    what follows and precedes the layers, as in Llama 3 (arXiv 2407.21783, section 3.3.2). In a cut of parts, any stage
    may have no layers; a stage between the first and the last then only passes on what it receives.

    Raises UsageError for more stages than that without a cut of parts, and as `stage_parts`.
    """
    stages, layers = placement.num_stages, model.layers
    if not isinstance(cut, str) and len(cut) == stages and (parts := _covering(cut, layers)):
        return parts
    if stages > layers + 2:
        raise UsageError(
            f"{layers} layers cannot fill {stages} stages on {placement.num_ranks} ranks: use fewer ranks or chunks, "
            f"at most {layers + 2} stages, of which the first and the last have no layers"
        )
    if isinstance(cut, str) and stages > layers:
        ends = [(0, 0), (layers, layers)]
        return [*ends[: stages - layers - 1], *((layer, layer + 1) for layer in range(layers)), ends[1]]
    return stage_parts(layers, stages, cut)


def _covering(cut: Sequence[float] | Sequence[Part], layers: int) -> list[Part]:
    """The parts of a cut if each starts where the one before ends and they cover the layers, otherwise none."""
    parts = [(each[0], each[1]) for each in cut if isinstance(each, Sequence) and len(each) == 2]
    steps = [0, *(end for part in parts for end in part), layers]
    follows = all(one == other for one, other in zip(steps[::2], steps[1::2], strict=True))
    return parts if len(parts) == len(cut) and follows and all(start <= end for start, end in parts) else []


def shares_of(model: Transformer, parts: Sequence[Part]) -> tuple[Share, ...]:
    """Per stage its share. `parts` are the layers of all stages."""
    return _shares_of(model.kinds, tuple(parts))


@lru_cache(maxsize=1024)
def _shares_of(kinds: tuple[LayerKind, ...], parts: tuple[Part, ...]) -> tuple[Share, ...]:
    """As `shares_of`, for layers of these kinds: a search has the same cut in many layouts."""
    last = len(parts) - 1
    return tuple(Share(kinds[start:end], stage == 0, stage == last) for stage, (start, end) in enumerate(parts))


class Parameters(NamedTuple):
    """How many parameters a device has: `experts` are those of experts that tokens are sent to, `others` the rest."""

    others: int
    experts: int

    @property
    def total(self) -> int:
        """How many there are of both kinds."""
        return self.others + self.experts


def parameters_of(model: Transformer, shares: Iterable[Share], setup: Setup) -> Parameters:
    """Parameters of a device that holds these shares together."""
    return _parameters_of(model, tuple(shares), setup.tensor, setup.expert, setup.expert_split)


@lru_cache(maxsize=8192)
def _parameters_of(
    model: Transformer, held: tuple[Share, ...], tensor: int, expert: int, expert_split: int
) -> Parameters:
    """As `parameters_of`: layouts differ in much else."""
    first, last = any(share.first for share in held), any(share.last for share in held)
    kinds = [kind for share in held for kind in share.layers]
    routed = routed_layers([*kinds, *model.further_kinds * last])
    others = model.parameters_held(kinds, tensor, first=first, last=last)
    return Parameters(others, routed * model.expert_parameters(expert, expert_split))


def for_shares(model: Transformer, parts: Sequence[Part], of: Callable[[Share], T]) -> list[T]:
    """`of` the share of each stage, computed once for each that differs."""
    shares = shares_of(model, parts)
    found = {share: of(share) for share in set(shares)}
    return [found[share] for share in shares]


def sequence_of(model: Transformer, setup: Setup) -> int:
    """Tokens per sequence. Raises UsageError where the model has no place for them, or the setup cannot split it."""
    sequence = model.tokens if setup.sequence is None else setup.sequence
    model.require_tensor(setup.tensor)
    model.require_sequence(sequence)
    if model.pattern is not None:
        require_scan_setup(model, setup)
        require_scan_ranks(model, setup.tensor, setup.context)
    parts = setup.context * (setup.tensor if setup.sequence_parallel else 1)
    if sequence % parts:
        raise UsageError(f"a sequence of {sequence} tokens does not divide into {parts} parts: use a multiple")
    heads = model.heads // setup.tensor
    if setup.context_kind == "all-to-all" and heads % setup.context:
        near = near_divisors(heads, setup.context)
        raise UsageError(f"context={setup.context} ranks do not divide the {heads} heads of a tensor rank: {near}")
    return sequence


def slice_parts(setup: Setup) -> int:
    """The number of equal parts that each slice of a sequence has: two on each context rank, for sequence parallelism
    as many as there are tensor ranks.
    """
    return (2 * setup.context if setup.context > 1 else 1) * (setup.tensor if setup.sequence_parallel else 1)


def tokens_of(model: Transformer, setup: Setup) -> int:
    """Tokens of a microbatch on one device: its context ranks share them. Raises UsageError as `sequence_of`."""
    return setup.microbatch_size * sequence_of(model, setup) // setup.context


def passed_bytes(model: Transformer, setup: Setup) -> int:
    """Bytes of what a stage passes to the next one for a microbatch; its gradient has as many."""
    return tokens_of(model, setup) * whole_values(model, setup) * setup.precision.weight


def whole_values(model: Transformer, setup: Setup) -> int:
    """Numbers per token in tensors that tensor ranks do not split: h, or h/t with sequence parallelism."""
    return model.hidden // setup.tensor if setup.sequence_parallel else model.hidden
