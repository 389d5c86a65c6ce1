"""Plan: the cost of a layout, on each rank and as a step, and its words. Must not contain: how it is computed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from html import escape
from typing import NamedTuple

from pipeflow.core.analysis.simulation import simulate
from pipeflow.core.cost import CostModel
from pipeflow.core.partition import Part
from pipeflow.core.placement import Placement
from pipeflow.core.schedule import Schedule
from pipeflow.core.text import aligned, bytes_text, count_text, number, percent, seconds_text
from pipeflow.core.timeline import Timeline
from pipeflow.planning.attention import Kernel, fastest
from pipeflow.planning.blocks import Transformer
from pipeflow.planning.cluster import Cluster
from pipeflow.planning.device_map import DeviceMap, map_devices
from pipeflow.planning.engines import engine_named
from pipeflow.planning.layer_kinds import routed_layers
from pipeflow.planning.layout_string import LayoutString
from pipeflow.planning.physical import layer_forward
from pipeflow.planning.rank_memory import RankPlan, groups_of
from pipeflow.planning.setup import Setup
from pipeflow.planning.shares import sequence_of

TITLES = ("rank", "layers", "parameters", "weights +\ngradients", "optimizer", "activations", "peak", "idle")
DIVIDED = {
    1: "the optimizer state is",
    2: "gradients and the optimizer state are",
    3: "weights, gradients and the optimizer state are",
}


class StepParts(NamedTuple):
    """The parts of a step's time, in seconds; their sum is the step.

    Attributes:
        compute: the busiest rank's computations, without the parts below. If ranks of the cluster share processors,
            this includes the time in which it waits for a processor.
        tensor: communication of its tensor ranks.
        sharding: the time that gathers of divided weights, and reductions of divided gradients, add to its
            microbatches.
        bubble: its idle time if transfers were free.
        transfer: the time that transfers between stages add.
        reduction: the time that the reductions of gradients over the replicas add, and those of a word table on two
            ranks.
        optimizer: the step of the optimizer.
    """

    compute: float
    tensor: float
    sharding: float
    bubble: float
    transfer: float
    reduction: float
    optimizer: float


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The part of a Plan that holds for any model: Plan describes the attributes."""

    schedule: Schedule
    setup: Setup
    cost: CostModel
    timeline: Timeline
    ranks: tuple[RankPlan, ...]
    cluster: Cluster | None
    step_parts: StepParts | None

    @property
    def has_seconds(self) -> bool:
        """Whether times are in seconds, and not relative to each other."""
        return self.cluster is not None

    @property
    def step_seconds(self) -> float | None:
        """The time of one step, in seconds; None if times are not. Without a cluster, only computations count."""
        if self.step_parts is not None:
            return sum(self.step_parts)
        return self.timeline.makespan if self.has_seconds else None

    @property
    def peak_bytes(self) -> float:
        """The memory of the fullest device, in bytes."""
        return max(rank.peak_bytes for rank in self.ranks)

    @property
    def device_map(self) -> DeviceMap | None:
        """The kinds of devices that its ranks lie on. None without a cluster."""
        return None if self.cluster is None else map_devices(self.cluster, self.setup, len(self.ranks))

    @property
    def missing(self) -> tuple[float, Cluster] | None:
        """By how many bytes the device with least room exceeds it, and its kind; negative where it has room left. None
        without a cluster.
        """
        if (mapped := self.device_map) is None:
            return None
        kinds = [min(mapped.on(rank.rank), key=lambda kind: kind.usable_bytes) for rank in self.ranks]
        needed = [rank.least_bytes + self.outside_bytes for rank in self.ranks]
        lacking = [most - kind.usable_bytes for most, kind in zip(needed, kinds, strict=True)]
        worst = max(range(len(lacking)), key=lacking.__getitem__)
        return lacking[worst], kinds[worst]

    @property
    def outside_bytes(self) -> int:
        """The memory that a process takes from its device outside of tensors: for its context and its communicators. 0
        without a cluster.
        """
        return 0 if self.cluster is None else self.cluster.outside_bytes(groups_of(self.setup, len(self.ranks)))

    @property
    def device_bytes(self) -> float:
        """Bytes that the fullest device needs: its `least_bytes` and `outside_bytes`."""
        return max(rank.least_bytes for rank in self.ranks) + self.outside_bytes

    @property
    def peak_parts(self) -> dict[str, float]:
        """The parts of `peak_bytes`, in bytes."""
        return max(self.ranks, key=lambda rank: rank.peak_bytes).peak_parts

    @property
    def fits(self) -> bool | None:
        """Whether each device has room for what it needs. None without a cluster."""
        return None if (missing := self.missing) is None else missing[0] <= 0

    @property
    def makespan_bubble_ratio(self) -> float:
        """The bubble of a step: the timeline's."""
        return self.timeline.makespan_bubble_ratio

    @property
    def even_makespan_bubble_ratio(self) -> float:
        """The schedule's bubble if all stages cost the same, as in its formula. It simulates a step."""
        return simulate(self.schedule, evened(self.cost)).makespan_bubble_ratio

    @property
    def bubble_ratio(self) -> float:
        """The bubble of the span: the timeline's."""
        return self.timeline.bubble_ratio

    @property
    def attention(self) -> Kernel | None:
        """The kernel of attention. None if neither the setup nor a cluster says which, or each kind has another one."""
        fused = () if self.cluster is None else {fastest(kind.device.like) for kind in self.cluster.groups}
        return self.setup.kernel or (min(fused) if len(fused) == 1 else None)

    @property
    def devices(self) -> int:
        """The number of devices in all replicas."""
        return len(self.ranks) * self.setup.tensor * self.setup.replicas

    def __str__(self) -> str:
        """The plan as `pipeflow plan` prints it."""
        return "\n".join([*self.heading(), "", *aligned(TITLES, self.rows()), "", *self.totals()])

    def _repr_html_(self) -> str:
        """The plan as notebooks show it."""
        lines = "<br>".join(map(escape, self.heading()))
        head = "".join(f"<th>{escape(title)}</th>" for title in TITLES)
        body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in self.rows())
        totals = "<br>".join(map(escape, self.totals()))
        return f"<p>{lines}</p><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table><p>{totals}</p>"

    def heading(self) -> Iterator[str]:
        """Lines on what is planned: the layout, and the bytes of a parameter."""
        setup, precision = self.setup, self.setup.precision
        split = f"pipeline {len(self.ranks)} x tensor {setup.tensor} x data {setup.data}"
        if setup.context > 1:
            split += f" x context {setup.context} ({setup.context_kind})"
        yield f"{self.schedule.name} on {self.devices} devices: {split}"
        yield self._batch()
        states = {"master weight": precision.master, "moments": precision.moments}
        parts = {"weight": precision.weight, "gradient": precision.gradient} | states
        yield f"{precision.name}: {', '.join(f'{part} {of}' for part, of in parts.items() if of)} bytes a parameter"
        if setup.zero and setup.shards > 1:
            yield f"ZeRO-{setup.zero}: {DIVIDED[setup.zero]} split over {setup.shards} of {setup.replicas} replicas"
        if further := ", ".join(_further(setup)):
            yield f"layers: {further}"
        if (mapped := self.device_map) is not None and len(mapped.kinds) > 1:
            yield f"stages: {mapped.described(self.schedule.placement)}"

    def rows(self) -> list[list[str]]:
        """The table of ranks, as text. The columns are TITLES."""
        return [
            [
                str(rank.rank),
                str(rank.layers),
                count_text(rank.parameters),
                *map(
                    bytes_text, (rank.weight_bytes + rank.gradient_bytes, rank.optimizer_bytes, rank.activation_bytes)
                ),
                bytes_text(rank.peak_bytes),
                percent(rank.idle),
            ]
            for rank in self.ranks
        ]

    def totals(self) -> Iterator[str]:
        """Lines on the highest peak, the time of a step, and its bubble."""
        highest = max(self.ranks, key=lambda rank: rank.peak_bytes)
        what = "scores that are" if self.setup.checkpoint == "selective" else "layer that is"
        what = f"loss or the {what}" if engine_named(self.setup.engine).loss else what
        again = (
            f"{bytes_text(highest.recomputed_bytes)} for the {what} recomputed, " if highest.recomputed_bytes else ""
        )
        peak = f"peak: {bytes_text(highest.peak_bytes)} on rank {highest.rank}"
        yield f"{peak}, of which {again}{bytes_text(highest.allocator_bytes)} for the allocator"
        if self.outside_bytes:
            yield f"  beside it {bytes_text(self.outside_bytes)} for the context and for communicators"
        if self.missing is not None and not self.fits:
            missing, kind = self.missing
            more = f"{bytes_text(missing)} more than {kind.device.name} has room for ({bytes_text(kind.usable_bytes)})"
            yield f"  does not fit: {more} (pipeflow plan --devices {self.devices} --batch B finds layouts that fit)"
        yield self._step()
        if self.step_parts is not None:
            shares = self.step_parts._asdict().items()
            yield "  " + ", ".join(f"{name} {seconds_text(value)}" for name, value in shares if value)
        busiest = min(self.ranks, key=lambda rank: rank.idle)
        bubble, of_span = map(percent, (self.makespan_bubble_ratio, self.bubble_ratio))
        beside = f"; bubble of span: {of_span}" if of_span != bubble else ""
        yield f"bubble: {bubble} (idle time of rank {busiest.rank}, the busiest rank){beside}"
        if bubble != (even := percent(self.even_makespan_bubble_ratio)):
            work = [1 - rank.idle for rank in self.ranks]
            times = f"{(1 - busiest.idle) * len(work) / sum(work):.3g} times as long as the average"
            yield f"  With equal stages: {even}. Rank {busiest.rank} works {times},"
            yield f"  with {self._share(busiest)}."

    def _batch(self) -> str:
        return f"{self.schedule.num_microbatches} microbatches of {self.setup.microbatch_size} samples"

    def _step(self) -> str:
        return f"step: {seconds_text(self.timeline.makespan if self.step_seconds is None else self.step_seconds)}"

    def _share(self, busiest: RankPlan) -> str:
        """The part of the model that the busiest rank has."""
        return f"{busiest.layers} of the {sum(rank.layers for rank in self.ranks)} layers"


@dataclass(frozen=True, slots=True)
class Plan(StepPlan):
    """The result of `plan`. Times are in seconds if a cluster or `flops` was given, else in forwards of one layer.

    Attributes:
        model: the sizes of the model.
        flops: operations per second of one device, or None.
        schedule: the schedule that was simulated.
        setup: the layout and the precision.
        cost: the costs of the stages.
        timeline: the simulated step, without reductions of gradients and without the optimizer.
        ranks: parameters, bytes and times of each pipeline rank.
        cluster: the cluster that was given, or None.
        step_parts: the parts of the step's time; None without a cluster.
    """

    model: Transformer
    flops: float | None

    @property
    def has_seconds(self) -> bool:
        """Whether times are in seconds, and not relative to each other."""
        return self.flops is not None or self.cluster is not None

    @property
    def parameters_total(self) -> int:
        """The parameters of the whole model; tied weights count once."""
        return self.model.parameters

    @property
    def sequence(self) -> int:
        """The number of tokens of a sequence."""
        return sequence_of(self.model, self.setup)

    @property
    def tokens(self) -> int:
        """The number of tokens of a step, over all replicas."""
        batch = self.schedule.num_microbatches * self.setup.microbatch_size * self.setup.data
        return batch * self.sequence

    @property
    def tokens_per_second(self) -> float | None:
        """The speed of all devices together; None if times are not in seconds."""
        return None if self.step_seconds is None else self.tokens / self.step_seconds

    @property
    def cut(self) -> tuple[Part, ...]:
        """Per stage, its layers [start, end)."""
        return tuple(
            part
            for _, part in sorted({each for rank in self.ranks for each in zip(rank.stages, rank.parts, strict=True)})
        )

    @property
    def layout_string(self) -> str | None:
        """The stages as a string that Megatron-LM reads (see `LayoutString`). None unless stage i is on rank i modulo
        the number of ranks, as such a string means it.
        """
        placement = self.schedule.placement
        looped = Placement.looped(placement.num_ranks, max(1, placement.num_stages // placement.num_ranks))
        return str(LayoutString.of(self.cut, self.model.further_layers)) if placement == looped else None

    @property
    def has_uneven_layout(self) -> bool:
        """Whether there is a `layout_string`, and its stages have different numbers of layers."""
        return self.layout_string is not None and len({end - start for start, end in self.cut}) > 1

    def heading(self) -> Iterator[str]:
        """Lines on what is planned: the sizes of the model, the layout, and the bytes of a parameter."""
        model = self.model
        yield f"{self.parameters_total:,} parameters, {model.layers} layers, hidden {model.hidden}, {model.heads} heads"
        if model.experts > 1:
            active, uses = count_text(model.active_parameters), model.experts_per_token + model.shared_experts
            divided = f"; {self.setup.expert} expert ranks" if self.setup.expert > 1 else ""
            has = routed_layers(model.kinds)
            where = f" in {has} of {model.layers} layers" if has < model.layers else ""
            yield f"{model.experts} experts{where}: a token uses {uses}, {active} parameters{divided}"
        yield from super(Plan, self).heading()
        if self.has_uneven_layout:
            yield f"layout: {self.layout_string}"

    def _batch(self) -> str:
        each = f"{self.schedule.num_microbatches} microbatches of {self.setup.microbatch_size}"
        return f"{each} x {self.sequence} tokens, {self.tokens:,} tokens a step"

    def _step(self) -> str:
        if self.step_seconds is None or self.tokens_per_second is None:
            return f"step: {number(self.timeline.makespan)} times the forward of one layer (a device gives seconds)"
        return f"step: {seconds_text(self.step_seconds)}, {number(self.tokens_per_second)} tokens/s"

    def _share(self, busiest: RankPlan) -> str:
        share = f"{busiest.layers} of the {self.model.layers} layers"
        if self.schedule.placement.num_stages - 1 in busiest.stages:
            head = self.model.head_flops / layer_forward(self.model, self.setup)
            share += f" and the head, worth {head:.2g} layers"
        return share


def _further(setup: Setup) -> Iterator[str]:
    """Settings of single modules and layers, in words."""
    if setup.lora_rank:
        yield f"adapters of rank {setup.lora_rank} for {' and '.join(setup.lora_targets)}"
    if setup.recompute_modules:
        yield f"{' and '.join(setup.recompute_modules)} recomputed"
    if setup.checkpoint_layers is not None:
        yield f"{setup.checkpoint_layers} of each stage recomputed"
    if setup.offload_layers:
        yield f"{setup.offload_layers} of each stage offloaded"
    if setup.offload_optimizer:
        yield f"{setup.offload_optimizer:.0%} of the optimizer on the host"
    if setup.cuda_graphs:
        yield f"CUDA graphs of {' and '.join(setup.cuda_graphs)}"


def evened(cost: CostModel) -> CostModel:
    """The costs if all stages were equal: the same work, spread evenly over the stages."""

    def mean(times: tuple[float, ...]) -> tuple[float, ...]:
        return (sum(times) / len(times),) * len(times)

    return replace(
        cost,
        forward=mean(cost.forward),
        backward_input=mean(cost.backward_input),
        backward_weight=mean(cost.backward_weight),
    )
