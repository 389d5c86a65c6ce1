"""RankPlan: the memory of the devices of a pipeline rank, and the most that a rank of a schedule keeps for its
backwards, which follows from its row alone. Must not contain: times.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

from pipeflow.core.action import Action
from pipeflow.core.dataflow import DATAFLOW, Content
from pipeflow.core.liveness import MemoryChange, memory_changes
from pipeflow.core.partition import Part
from pipeflow.core.placement import Placement
from pipeflow.core.schedule import Schedule
from pipeflow.planning.blocks import Transformer
from pipeflow.planning.engines import engine_named
from pipeflow.planning.kept import gradient_bytes, layer_kept, recomputed_bytes, saved_bytes
from pipeflow.planning.layer_kinds import LayerKind
from pipeflow.planning.setup import Setup
from pipeflow.planning.shares import Parameters, Share, for_shares, parameters_of, passed_bytes, shares_of, tokens_of
from pipeflow.planning.transformer import GPT
from pipeflow.planning.work import learned_parameters
from pipeflow.schedules.orders.additions import WHOLE

ALLOCATOR = 0.04
"""Memory that torch's caching allocator holds but does not hand out, as a share of what it hands out: the median of 11
logs of Megatron-LM jobs that print both, at peaks of 41 to 136 GB (0.8 % to 14 %; benchmarks/data has them).
"""


LEAST_ALLOCATOR = 0.008
"""The least of these logs. An allocator that finds no room gives back what it does not use, so a layout fits with less
than ALLOCATOR.
"""
Counts = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RankPlan:
    """The memory of each device of one pipeline rank. Bytes are those of one device.

    Attributes:
        rank: the pipeline rank.
        stages: its stages.
        parts: their layers [start, end).
        parameters: number of parameters on one device. A word table that is also the head counts once.
        weight_bytes, gradient_bytes: bytes of these parameters and of their gradients.
        master_bytes, moment_bytes: bytes of the optimizer's master weights, and of Adam's two moments.
        activation_bytes: the most bytes that the schedule keeps at once for backwards.
        recomputed_bytes: additional bytes that the backward of one layer recomputes, or those of the loss if they and
            the gradients in it are less.
        backward_bytes: gradients of activations while the backward of one layer runs.
        gathered_bytes: bytes of weights that are whole only while they are used, and of gradients before each device
            has its part.
        buffer_bytes: bytes of the buffers in which the engine reduces gradients.
        step_bytes: bytes of the float32 gradients of master weights, during the optimizer's step. Nothing is kept for
            backwards then, so only what exceeds that adds to the peak.
        transfer_bytes: bytes of received activations and gradients that no computation has taken yet. This is one
            activation for each stage whose previous stage is on another rank, and one gradient for each stage whose
            next stage is; with an engine that buffers all, one for each microbatch, and the logits of all of them.
        idle: the part of the step time in which the rank computes nothing.
    """

    rank: int
    stages: tuple[int, ...]
    parts: tuple[Part, ...]
    parameters: int
    weight_bytes: int
    gradient_bytes: int
    master_bytes: int
    moment_bytes: int
    activation_bytes: float
    recomputed_bytes: int
    backward_bytes: int
    gathered_bytes: int
    buffer_bytes: int
    step_bytes: int
    transfer_bytes: float
    idle: float

    @property
    def layers(self) -> int:
        """The number of layers of its stages."""
        return sum(end - start for start, end in self.parts)

    @property
    def optimizer_bytes(self) -> int:
        """The bytes of master weights and moments together."""
        return self.master_bytes + self.moment_bytes

    @property
    def _beside_step(self) -> float:
        """Bytes that are free during the optimizer's step."""
        in_layer = self.recomputed_bytes + self.backward_bytes
        return self.activation_bytes + in_layer + self.gathered_bytes + self.transfer_bytes

    @property
    def _used_bytes(self) -> float:
        state = self.weight_bytes + self.gradient_bytes + self.optimizer_bytes + self.buffer_bytes
        return state + max(self._beside_step, self.step_bytes)

    @property
    def peak_parts(self) -> dict[str, float]:
        """The parts that `peak_bytes` is the sum of, in bytes."""
        return {
            "weights": self.weight_bytes,
            "gradients": self.gradient_bytes,
            "optimizer": self.optimizer_bytes,
            "activations": self.activation_bytes,
            "recomputed": self.recomputed_bytes,
            "backward": self.backward_bytes,
            "gathered": self.gathered_bytes,
            "buffers": self.buffer_bytes,
            "transfers": self.transfer_bytes,
            "step": max(0.0, self.step_bytes - self._beside_step),
            "allocator": self.allocator_bytes,
        }

    @property
    def allocator_bytes(self) -> float:
        """An allowance for memory that the allocator reserves but does not use: the share ALLOCATOR of all the rest."""
        return ALLOCATOR * self._used_bytes

    @property
    def least_bytes(self) -> float:
        """`peak_bytes` with LEAST_ALLOCATOR: with less, the rank cannot run."""
        return (1 + LEAST_ALLOCATOR) * self._used_bytes

    @property
    def peak_bytes(self) -> float:
        """The sum of all these bytes, with the allowance."""
        return self._used_bytes + self.allocator_bytes


class Held(NamedTuple):
    """The memory of one device of a pipeline rank, besides activations: see RankPlan.

    Attributes:
        parts, recomputed_bytes, backward_bytes, transfer_bytes: as in RankPlan.
        stages: parameters of each of its stages.
        whole: parameters of all of them. A word table that is also the head counts once.
        pair: parameters of two layers, one after the other, that have the most together; of one layer, twice its own.
        ends: parameters in no layer.
        tables: per stage, numbers of its whole gradients that belong to other tensor ranks.
        adapters: parameters of adapters, which are not among those above.
        layer_kept: bytes that one layer at least keeps for its backward, for a microbatch.
    """

    parts: tuple[Part, ...]
    recomputed_bytes: int
    backward_bytes: int
    transfer_bytes: float
    stages: tuple[Parameters, ...]
    whole: Parameters
    pair: tuple[Parameters, Parameters]
    ends: Parameters
    tables: tuple[int, ...]
    adapters: int = 0
    layer_kept: int = 0


def state_bytes(
    model: Transformer, setup: Setup, placement: Placement, parts: Sequence[Part], microbatches: int
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """The bytes of each rank's devices, without and with the optimizer's step, under a schedule of so many microbatches
    that keeps nothing for backwards. `parts` are the layers of all stages. Ranks that hold and send the same amounts
    are computed once.
    """
    found: dict[object, tuple[float, float]] = {}
    needed, shares = [], shares_of(model, parts)
    for rank, borders in enumerate(_borders(placement)):
        kind = (len(borders), *(shares[stage] for stage in placement.stages_of(rank)))
        if kind not in found:
            held = held_by(model, setup, placement, parts, rank, microbatches)
            state = rank_plan(setup, placement, rank, held, kept=0.0, idle=0.0)
            found[kind] = replace(state, step_bytes=0).peak_bytes, state.peak_bytes
        needed.append(found[kind])
    state_, step = zip(*needed, strict=True)
    return state_, step


def held_by(
    model: Transformer, setup: Setup, placement: Placement, parts: Sequence[Part], rank: int, microbatches: int = 1
) -> Held:
    """The memory of one device of a pipeline rank, besides activations. `parts` are the layers of all stages."""
    stages, engine = placement.stages_of(rank), engine_named(setup.engine)
    buffers = microbatches if engine.buffers_all and placement.num_ranks > 1 else 1
    shares = shares_of(model, parts)
    own = [shares[stage] for stage in stages]
    layers = dict.fromkeys((kind, its) for share in dict.fromkeys(own) for _, kind, its in share.kinds(model, setup))
    in_layers = [_in_layer(kind, its) for kind, its in layers]
    again, backward, _ = max(in_layers, key=lambda each: each[0] + each[1], default=(0, 0, 0))
    received = transferred(placement, rank, [float(buffers * passed_bytes(model, setup))] * len(parts))
    if any(share.last for share in own):  # the loss comes before any layer is computed again
        logits, width = round(tokens_of(model, setup) * model.head_outputs(setup.tensor)), setup.precision.weight
        loss = engine.loss if setup.tensor == 1 else engine.loss_parts
        output = width * logits if engine.buffers_all and placement.num_ranks > 1 else 0
        in_loss = loss * logits - output
        if setup.head_slices > 1:  # one slice is there at once, before its stage keeps anything of it
            in_loss = (loss + 4) * -(-logits // setup.head_slices) - output
        if in_loss > again + backward:
            again, backward = in_loss, 0
        received += buffers * output
    each = {share: parameters_of(model, [share], setup) for share in set(own)}
    return Held(
        tuple(parts[stage] for stage in stages),
        again,
        backward,
        received,
        tuple(each[share] for share in own),
        parameters_of(model, own, setup),
        _pair(model, [kind for share in own for kind in share.layers], setup),
        parameters_of(model, [share._replace(layers=()) for share in own], setup),
        tuple(_others_rows(model, setup) if share.first else 0 for share in own),
        learned_parameters(model, own, setup).total,
        tokens_of(model, setup) * min((kept for _, _, kept in in_layers), default=0),
    )


@lru_cache(maxsize=1024)
def _in_layer(model: Transformer, setup: Setup) -> tuple[int, int, int]:
    """Bytes that the backward of a layer recomputes, those of gradients in it, and those per token that it keeps."""
    return recomputed_bytes(model, setup), gradient_bytes(model, setup), layer_kept(model, setup)


def kept_by_stages(model: Transformer, setup: Setup, parts: Sequence[Part]) -> list[float]:
    """Per stage, the bytes that it keeps of a microbatch for its backward. `parts` are the layers of all stages."""
    return for_shares(model, parts, lambda share: tokens_of(model, setup) * saved_bytes(model, setup, share))


def kept_of_model(model: Transformer, setup: Setup) -> tuple[float, int]:
    """The bytes that all stages together keep of a microbatch, or less, and those that the backward of the lightest
    layer needs besides. Where layers of a kind differ, as the number of layers of a stage says, none is counted.
    """
    if setup.checkpoint_layers is not None or setup.offload_layers:
        return 0.0, 0
    whole = Share(model.kinds, first=True, last=True)
    in_layers = (_in_layer(kind, its) for _, kind, its in whole.kinds(model, setup))
    return tokens_of(model, setup) * saved_bytes(model, setup, whole), min(again + made for again, made, _ in in_layers)


def _pair(model: Transformer, layers: Sequence[LayerKind], setup: Setup) -> tuple[Parameters, Parameters]:
    """The `pair` of a rank with these layers."""
    pairs = set(pairwise(layers)) or {(kind, kind) for kind in layers}
    each = {kind: parameters_of(model, [Share((kind,), first=False, last=False)], setup) for kind in set(layers)}
    none = Parameters(0, 0)
    found = [(each[one], each[other]) for one, other in pairs]
    return max(found, key=lambda pair: sum(layer.total for layer in pair), default=(none, none))


def _others_rows(model: Transformer, setup: Setup) -> int:
    """Numbers of the word table's gradient that belong to other tensor ranks and are kept until it is divided."""
    if not (isinstance(model, GPT) and engine_named(setup.engine).whole_tables):
        return 0
    return (model.vocabulary - model.vocabulary_rows(setup.tensor)) * model.hidden


def transferred(placement: Placement, rank: int, sent: Sequence[float]) -> float:
    """The `transfer_bytes` of a rank. `sent` are the bytes that each stage sends to the next one."""
    return sum(sent[stage] for stage in _borders(placement)[rank])


@lru_cache(maxsize=256)
def _borders(placement: Placement) -> tuple[tuple[int, ...], ...]:
    """Per rank, the stages at whose end a microbatch leaves the rank or enters it."""
    found: list[list[int]] = [[] for _ in range(placement.num_ranks)]
    for path in placement.paths:
        for stage, (one, other) in enumerate(pairwise(path)):
            if one != other:
                found[one].append(stage)
                found[other].append(stage)
    return tuple(map(tuple, found))


def stage_gradients(setup: Setup, placement: Placement, rank: int, held: Held) -> dict[int, float]:
    """Per stage of a rank, the bytes of its whole gradients if they are whole only from its first backward to its last.
    Empty if that is not so.
    """
    if placement.num_ranks == 1 or not _divides_float32(setup):
        return {}
    width, stages = _gradient_width(setup, by_layer=False), placement.stages_of(rank)
    counts = zip(stages, held.stages, held.tables, strict=True)
    return {stage: float(width * (each.total + others)) for stage, each, others in counts}


def _divides_float32(setup: Setup) -> bool:
    """Whether float32 weights and gradients are what the engine divides, and what it gathers is cast (FSDP2)."""
    return engine_named(setup.engine).float32_sums and setup.zero == 3 and setup.shards > 1


def rank_plan(
    setup: Setup,
    placement: Placement,
    rank: int,
    held: Held,
    *,
    kept: float,
    idle: float,
    gradients: float | None = None,
) -> RankPlan:
    """The plan of a rank that keeps at most `kept` bytes of activations and is idle for the part `idle` of the step.
    `gradients`: bytes of the whole gradients at that time, if that is not all of them all the time.
    """
    precision, zero, by_layer = setup.precision, setup.zero, placement.num_ranks == 1
    parameters = held.whole.total
    part = -(-held.whole.others // setup.shards) - (-held.whole.experts // setup.expert_shards)
    is_divided = zero > 1 and by_layer and not setup.reduce_once
    width = _gradient_width(setup, by_layer=by_layer)
    whole = width * (part if is_divided else parameters) if gradients is None else round(gradients)
    if _divides_float32(setup) and not is_divided:
        whole += width * part
    learned, own = precision.learned or precision, -(-held.adapters // setup.shards)
    on_device = 1 - setup.offload_optimizer
    return RankPlan(
        rank,
        placement.stages_of(rank),
        held.parts,
        parameters + held.adapters,
        weight_bytes=(part if zero == 3 else parameters)
        * (0 if _divides_float32(setup) and precision.master else precision.weight)
        + held.adapters * learned.weight,
        gradient_bytes=whole + held.adapters * learned.gradient,
        master_bytes=round(on_device * (part * precision.master + own * learned.master)),
        moment_bytes=round(on_device * (part * precision.moments + own * learned.moments)),
        activation_bytes=kept,
        recomputed_bytes=held.recomputed_bytes,
        backward_bytes=held.backward_bytes,
        gathered_bytes=_gathered(setup, held, by_layer=by_layer),
        buffer_bytes=_buffers(setup, parameters),
        step_bytes=round(on_device * 4 * part) if precision.master and precision.gradient < 4 else 0,
        transfer_bytes=held.transfer_bytes,
        idle=idle,
    )


def _gradient_width(setup: Setup, *, by_layer: bool) -> int:
    """Bytes of a parameter's gradient, or of both of its gradients, as the engine keeps them."""
    precision, program = setup.precision, engine_named(setup.engine)
    if program.float32_sums and setup.shards > 1 and (setup.zero == 3 or not by_layer):
        return 4 if precision.gradient else 0
    has_both = program.both_gradients and setup.zero < 2 and precision.gradient > precision.weight
    return precision.gradient + (precision.weight if has_both else 0)


def _buffers(setup: Setup, parameters: int) -> int:
    """The `buffer_bytes` of a rank with so many parameters. With ZeRO-1 and float32 sums there are none."""
    precision = setup.precision
    if setup.shards == 1 or (setup.zero == 1 and precision.gradient > precision.weight):
        return 0
    return min(engine_named(setup.engine).bucket, parameters) * precision.gradient * (2 if setup.overlaps else 1)


def groups_of(setup: Setup, ranks: int) -> int:
    """How many kinds of groups communicate in a layout of so many pipeline ranks."""
    return sum(size > 1 for size in (setup.tensor, setup.context, setup.data, setup.expert, ranks))


def _gathered(setup: Setup, held: Held, *, by_layer: bool) -> int:
    """The `gathered_bytes` of a rank. Of layers, two are whole at a time, the one that computes and the next one. So
    are their gradients, which are made while what the layers kept is freed. What is in no layer is whole all the time.
    A pipeline rank has WHOLE of its stages whole, and two layers in the buffers from which gathered weights are copied.
    """
    precision = setup.precision
    if setup.zero < 2:
        return 0
    layers = [_divided(setup, each) for each in held.pair]
    if not by_layer:
        sizes = sorted(_divided(setup, each) for each in held.stages)
        return precision.weight * (sum(sizes[-WHOLE:]) + sum(layers)) if setup.zero == 3 else 0
    ends = _divided(setup, held.ends)
    gradient = 0 if setup.reduce_once else precision.gradient
    made = sum(max(0, gradient * layer - held.layer_kept) for layer in layers) + gradient * ends
    return made + (sum(layers) + ends) * (precision.weight if setup.zero == 3 else 0)


def _divided(setup: Setup, parameters: Parameters) -> int:
    """The parameters that several devices hold together."""
    others, experts = parameters
    return (others if setup.shards > 1 else 0) + (experts if setup.expert_shards > 1 else 0)


@dataclass(frozen=True, slots=True)
class RankPeaks:
    """The fullest states of one rank.

    Attributes:
        values: the kinds of values that the rank keeps, as (content, stage).
        states: per state, how many of each of these values the rank keeps at once. Every other state keeps at most as
            many of each value as one of these states.
    """

    values: tuple[tuple[Content, int], ...]
    states: tuple[Counts, ...]

    def bytes(self, sizes: Mapping[Content, Sequence[float]]) -> float:
        """The most bytes kept at once; `sizes` has the bytes per content and stage."""
        each = [sizes[content][stage] if content in sizes else 0.0 for content, stage in self.values]
        return max(
            (sum(count * size for count, size in zip(state, each, strict=True)) for state in self.states), default=0.0
        )


def peaks(schedule: Schedule) -> tuple[RankPeaks, ...]:
    """Per rank, its fullest states. For a schedule with backwards, their bytes are the `peak_bytes` of its timelines. A
    rank computes one action after another, so times do not matter.
    """
    return tuple(_of_rank(list(schedule.actions(rank))) for rank in range(len(schedule.rows)))


def with_gradients(
    row: Sequence[Action], sizes: Mapping[Content, Sequence[float]], gradients: Mapping[int, float]
) -> tuple[float, float]:
    """The bytes that a rank keeps for backwards, and those of whole gradients, at the moment when both together are
    most. A stage's `gradients` are whole from its first backward to its last.
    """
    makes = [any(content is Content.WEIGHT_GRADIENT for content, _ in DATAFLOW[each.kind].makes) for each in row]
    backwards = [(each.stage, position) for position, each in enumerate(row) if makes[position]]
    last, begun = dict(backwards), set[int]()
    kept = whole = 0.0
    most = kept, whole

    def bytes_of(contents: Sequence[Content], stage: int) -> float:
        return sum(sizes[content][stage] for content in contents if content in sizes)

    for position, (change, action) in enumerate(zip(memory_changes(row), row, strict=True)):
        stage = action.stage
        kept += bytes_of(change.from_start, stage)
        if makes[position] and stage not in begun:
            begun.add(stage)
            whole += gradients[stage]
        most = max(most, (kept, whole), key=sum)
        kept += bytes_of(change.from_end, stage) - bytes_of(change.frees, stage)
        if last.get(stage) == position:
            whole -= gradients[stage]
    return most


def _of_rank(row: Sequence[Action]) -> RankPeaks:
    places: dict[tuple[Content, int], int] = {}
    steps: dict[tuple[MemoryChange, int], tuple[list[int], list[int], list[int]]] = {}
    each = [(change, action.stage) for change, action in zip(memory_changes(row), row, strict=True)]
    for change, stage in dict.fromkeys(each):
        begins, comes, goes = (
            [places.setdefault((content, stage), len(places)) for content in contents]
            for contents in (change.from_start, change.from_end, change.frees)
        )
        steps[change, stage] = begins, comes, goes
    counts, seen, rises = [0] * len(places), set(), False
    for step in each:
        begins, comes, goes = steps[step]
        for place in begins:
            counts[place] += 1
        rises = rises or bool(begins)
        if goes and rises:
            seen.add(tuple(counts))
            rises = False
        for place in goes:
            counts[place] -= 1
        for place in comes:
            counts[place] += 1
        rises = rises or bool(comes)
    return RankPeaks(tuple(places), tuple(_undominated(seen)))


def _undominated(states: set[Counts]) -> list[Counts]:
    """The states that no other one exceeds in all counts."""
    kept: list[Counts] = []
    for state in sorted(states, key=lambda counts: (-sum(counts), counts)):
        if not any(all(map(int.__ge__, other, state)) for other in kept):
            kept.append(state)
    return kept
