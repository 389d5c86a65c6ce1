"""find_module_layouts: the fastest layouts of any module, from one forward per size of a microbatch. Must not contain:
how a module is counted, or what a layout costs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from torch import nn

from pipeflow.core.errors import UsageError, names_of
from pipeflow.core.placement import require_positive
from pipeflow.core.text import bytes_text
from pipeflow.engine.stages.blocks import Blocks
from pipeflow.planning.blocks import divisors
from pipeflow.planning.cluster import Cluster
from pipeflow.planning.layout import SEARCHED, Layout
from pipeflow.planning.layout_ties import Timed, plainest, ranking
from pipeflow.planning.layout_trials import ACTIONS, Family, families
from pipeflow.planning.pricing.module_plan import CountedModule, ModulePlan
from pipeflow.planning.setup import Checkpoint, Setup

GROUPS = 2  # kinds of groups: pipeline ranks and replicas
CHECKPOINTS: tuple[Checkpoint, ...] = ("none", "full")


@dataclass(frozen=True, slots=True)
class ModuleLayout:
    """A layout that `find_module_layouts` found.

    Attributes:
        layout: its sizes and schedule; its `cut` divides the blocks among the stages.
        plan: its cost. `plan.cuts` is what `Pipeline.from_module` takes.
    """

    layout: Layout
    plan: ModulePlan

    @property
    def step_seconds(self) -> float:
        """The time of a step, in seconds."""
        assert self.plan.step_seconds is not None
        return self.plan.step_seconds


def find_module_layouts(
    module: nn.Module,
    examples: Mapping[int, object],
    *,
    cluster: Cluster,
    devices: int,
    batch: int,
    setup: Setup | None = None,
    schedules: tuple[str, ...] = SEARCHED,
    blocks: Blocks = None,
    memory: float | None = None,
    top: int = 5,
) -> tuple[ModuleLayout, ...]:
    """The `top` best layouts of a module. The first is the recommended one, as in `find_layouts`: the plainest of all
    that are about as fast as the fastest. The others come by time, the fastest of each choice of pipeline ranks and
    replicas. The search tries all schedules with their chunks, full recomputation, and the given sizes of a microbatch,
    and plans them as `plan_module` does.

    Args:
        module: as in `plan_module`.
        examples: a dict from the number of samples to an example of one microbatch of that size, in a form that
            `Pipeline.from_module` takes.
        cluster, devices: what it is trained on.
        batch: samples per step, on all devices together.
        setup: the precision.
        schedules: names to try.
        blocks: as in `plan_module`.
        memory: the most bytes of a device in a plan; by default the device's memory minus what drivers take.
        top: how many layouts to return.

    Raises UsageError as `plan_module` does, and if no layout divides the devices and the batch. If the module fits
    nowhere, the error says how much memory is missing.
    """
    require_positive(devices=devices, batch=batch, top=top)
    schedules = names_of("schedules", schedules)
    base = Setup() if setup is None else setup
    cluster = cluster.alone(devices)
    limit = cluster.usable_bytes - cluster.outside_bytes(GROUPS) if memory is None else memory
    if not examples:
        raise UsageError("examples is empty: give microbatches by their number of samples, such as {1: batch}")
    found: dict[tuple[int, int], list[ModuleLayout]] = {}
    least: ModuleLayout | None = None
    for size, example in examples.items():
        counted = CountedModule.of(module, example, base, blocks)
        for each in _tried(counted, base, cluster, schedules, (devices, batch, size)):
            if least is None or each.plan.peak_bytes < least.plan.peak_bytes:
                least = each
            if each.plan.peak_bytes <= limit:
                found.setdefault((each.layout.pipeline, each.layout.data), []).append(each)
    if least is None:
        sizes = " or ".join(map(str, examples))
        raise UsageError(
            f"no layout divides a batch of {batch} into microbatches of {sizes} on {devices} devices: change one of "
            "these numbers"
        )
    if not found:
        more, layout = least.plan.peak_bytes - limit, least.layout
        raise UsageError(
            f"no layout fits: the closest one, pipeline {layout.pipeline} x data {layout.data} with {layout.schedule} "
            f"and microbatches of {layout.microbatch_size}, needs {bytes_text(more)} more than the limit of "
            f"{bytes_text(limit)}: use more devices, smaller blocks, or smaller microbatches"
        )
    every = [each for group in found.values() for each in group]
    [recommended] = _by_layout(every, [plainest(_timed(every))])
    best = _ranked([_ranked(group)[0] for group in found.values()])
    return (recommended, *(each for each in best if each is not recommended))[:top]


def _timed(found: list[ModuleLayout]) -> list[Timed]:
    return [(each.step_seconds, each.layout) for each in found]


def _ranked(found: list[ModuleLayout]) -> list[ModuleLayout]:
    return _by_layout(found, ranking(_timed(found)))


def _by_layout(found: list[ModuleLayout], order: list[Timed]) -> list[ModuleLayout]:
    return [next(each for each in found if each.layout is layout) for _, layout in order]


def _tried(
    counted: CountedModule, base: Setup, cluster: Cluster, schedules: tuple[str, ...], task: tuple[int, int, int]
) -> Iterator[ModuleLayout]:
    """All layouts for a task: devices, a batch, and the samples of a microbatch."""
    devices, batch, size = task
    for ranks in divisors(devices):
        data = devices // ranks
        if batch % (data * size):
            continue
        many = batch // (data * size)
        for checkpoint in CHECKPOINTS:
            setup = replace(base, data=data, microbatch_size=size, zero=int(data > 1), checkpoint=checkpoint)
            for family in families(schedules, ranks, len(counted.found)):
                if family.actions(many) <= ACTIONS:
                    plan = counted.plan(family.make(many), setup, cluster)
                    yield ModuleLayout(_layout(family, plan), plan)


def _layout(family: Family, plan: ModulePlan) -> Layout:
    schedule = plan.schedule
    cut = {stage: part for rank in plan.ranks for stage, part in zip(rank.stages, rank.parts, strict=True)}
    parts = tuple(cut[stage] for stage in range(schedule.placement.num_stages))
    options = dict(family.options)
    return Layout(plan.setup, len(schedule.rows), schedule.num_microbatches, family.name, options, parts)
