"""Published training steps: the rows of data/measured_steps.csv, whose columns are sizes, and of
data/measured_commands.csv, which has the words of `pipeflow plan`; and what the planner says of each.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Literal, cast

from pipeflow import GPT, PRECISIONS, Placement, Schedule, Setup, make_schedule, plan, simulate
from pipeflow.core.partition import Cut
from pipeflow.planning import efficiency
from pipeflow.planning.catalog import Model
from pipeflow.planning.cluster import Cluster
from pipeflow.planning.efficiency import Efficiency
from pipeflow.planning.layout import Layout
from pipeflow.planning.mesh import Mesh
from pipeflow.planning.physical import Physical, physical_costs
from pipeflow.planning.rank_memory import ALLOCATOR, groups_of
from pipeflow.planning.setup import Checkpoint
from pipeflow.planning.shares import stage_layers
from pipeflow.tools.cli.command import parser
from pipeflow.tools.cli.plan import LAYOUT, cut_of, model_of, setup_of
from pipeflow.tools.cli.plan_cluster import cluster_of

DATA = Path(__file__).parent / "data" / "measured_steps.csv"
COMMANDS = DATA.with_name("measured_commands.csv")
NETWORK = {"vtrain-single": 12.5e9, "vtrain-multi": 12.5e9, "2205.05198-tab5": 25e9}  # bytes/s of a device, one way
NUMBERS = ("layers", "hidden", "heads", "seq", "tp", "pp", "vp", "dp", "mbs", "gbs")  # of its columns
ROUNDS = 2  # of microbatches in the longer of two steps that an estimate is made from
VOCABULARY = 51200  # Megatron-LM's padded one


@dataclass(frozen=True)
class Row:
    """A measured step: seconds, and the layout that was run. `inner`: the axis of the mesh whose ranks are next to each
    other, after those of tensors. `release`: of the program, where a source has steps of several. `cut`: of the
    layers, as the words say it.
    """

    source: str
    model: Model
    setup: Setup
    pipeline: int
    chunks: int
    microbatches: int
    seconds: float
    cluster: Cluster = field(default_factory=partial(Cluster.of, "a100-80gb"))
    inner: Literal["pipeline", "data"] | None = None
    release: str = ""
    cut: Cut = "uniform"

    @property
    def devices(self) -> int:
        """How many ran it."""
        return self.pipeline * self.setup.tensor * self.setup.replicas

    @property
    def task(self) -> tuple[object, ...]:
        """What was to be done: rows that differ in their layout alone share it."""
        setup, batch = self.setup, self.microbatches * self.setup.microbatch_size * self.setup.data
        what = setup.precision.name, setup.sequence, setup.lora_rank, setup.frozen
        return self.source, self.release, self.model, self.devices, batch, self.cluster.device.name, *what

    @cached_property
    def layout(self) -> Layout:
        """As a search lists it."""
        family, options = _family(self.chunks)
        cut = tuple(stage_layers(self.model, self._placement, self.cut))
        return Layout(self.setup, self.pipeline, self.microbatches, family, options, cut)

    @property
    def _placement(self) -> Placement:
        return _schedule(self.pipeline, self.chunks, self.pipeline).placement

    def predicted(self, known: Mapping[str, float]) -> float:
        """Seconds of the step under the planner's cost model with these coefficients; by default its own."""
        costs = self._costs(known)
        return self._makespan(costs, self.microbatches) + costs.after

    def estimated(self, known: Mapping[str, float]) -> float:
        """The same for the fit, where steps are long from two shorter ones: each round of microbatches adds as much."""
        ranks, costs = self.pipeline, self._costs(known)
        rounds, rest = divmod(self.microbatches, ranks)
        if rest or rounds < 2 * ROUNDS:
            return self._makespan(costs, self.microbatches) + costs.after
        one, other = (self._makespan(costs, number * ranks) for number in (ROUNDS - 1, ROUNDS))
        return one + (rounds - ROUNDS + 1) * (other - one) + costs.after

    def _costs(self, known: Mapping[str, float]) -> Physical:
        mesh = Mesh.of(self.setup, self.pipeline, self.cluster.devices_per_node, self.inner)
        with coefficients(known):
            return physical_costs(self.model, self._placement, self.setup, self.cluster, mesh=mesh, cut=self.cut)

    def _makespan(self, costs: Physical, microbatches: int) -> float:
        return simulate(_schedule(self.pipeline, self.chunks, microbatches), costs.cost).makespan


@contextmanager
def coefficients(known: Mapping[str, float]) -> Iterator[None]:
    """Plans have these coefficients instead of the planner's own. Those of a device are named "h100 fp8", and are its
    share of products relative to A100.
    """
    own = efficiency.PUBLISHED, efficiency.REACHES
    names = [each.name for each in fields(Efficiency) if each.name in known]
    efficiency.PUBLISHED = replace(efficiency.PUBLISHED, **{name: known[name] for name in names})
    efficiency.REACHES = {
        like: {
            precision: {"products": known.get(f"{like} {precision}", relative["products"])}
            for precision, relative in own[1][like].items()
        }
        for like in own[1]
    }
    try:
        yield
    finally:
        efficiency.PUBLISHED, efficiency.REACHES = own


def _family(chunks: int) -> tuple[str, dict[str, int]]:
    return ("interleaved-1f1b", {"chunks": chunks}) if chunks > 1 else ("1f1b", {})


@cache
def _schedule(pipeline: int, chunks: int, microbatches: int) -> Schedule:
    name, options = _family(chunks)
    return make_schedule(name, ranks=pipeline, microbatches=microbatches, **options).with_reductions()


@dataclass(frozen=True)
class MeasuredBytes:
    """What the fullest device of a layout holds: GiB as published, bytes as planned."""

    label: str
    gib: float
    planned: float

    @property
    def error(self) -> float:
        """Of the planned bytes, as a share of the published ones."""
        return self.planned / 2**30 / self.gib - 1


def memory_rows() -> list[MeasuredBytes]:
    """Those with memory, which a formula gives for tensors alone, so plans are without the allocator's allowance."""
    with DATA.open() as file:
        return [_memory_row(each) for each in csv.DictReader(file) if each["mem_gib"]]


def _memory_row(each: dict[str, str]) -> MeasuredBytes:
    row = _row(each | {"step_s": "nan", "precision": "fp16-mixed"})
    setup = replace(row.setup, keep_scores=True, sequence_parallel=each["recompute"] == "selective")
    planned = plan(row.model, _schedule(row.pipeline, row.chunks, row.microbatches), setup).peak_bytes
    return MeasuredBytes(f"{each['model']}, {each['recompute']}", float(each["mem_gib"]), planned / (1 + ALLOCATOR))


def memory_commands() -> list[MeasuredBytes]:
    """Those of data/measured_memory.csv, whose layouts are given by the words of the command."""
    with DATA.with_name("measured_memory.csv").open() as file:
        return [_memory_command(each) for each in csv.DictReader(file)]


def device_commands() -> list[MeasuredBytes]:
    """Those of data/measured_devices.csv, whose bytes are all that a process takes on a device."""
    with DATA.with_name("measured_devices.csv").open(encoding="utf-8") as file:
        return [_memory_command(each, beside=True) for each in csv.DictReader(file)]


def _memory_command(each: dict[str, str], *, beside: bool = False) -> MeasuredBytes:
    row = _commanded(each | {"source": each["label"], "step_s": "nan"})
    schedule = _schedule(row.pipeline, row.chunks, row.microbatches)
    planned = plan(row.model, schedule, row.setup, cut=row.cut).peak_bytes
    if beside:
        planned += row.cluster.outside_bytes(groups_of(row.setup, row.pipeline))
    return MeasuredBytes(each["label"], float(each["mem_gib"]), planned)


def rows() -> list[Row]:
    """Those with a time."""
    with DATA.open(encoding="utf-8") as file, COMMANDS.open(encoding="utf-8") as commands:
        sized = [_row(each) for each in csv.DictReader(file) if each["step_s"]]
        return sized + [_commanded(each) for each in csv.DictReader(commands)]


def _commanded(each: dict[str, str]) -> Row:
    """A row whose layout is given by the words of the command."""
    words = parser("plan").parse_args(["plan", *each["words"].split()])
    cluster = cluster_of(words)
    assert cluster is not None  # every row names its device
    model, setup, chunks = model_of(words), setup_of(words, LAYOUT), words.chunks or 1
    placement = _schedule(words.pipeline, chunks, words.pipeline).placement
    return Row(
        each["source"],
        model,
        setup,
        words.pipeline,
        chunks,
        words.microbatches,
        float(each["step_s"]),
        cluster,
        release=each.get("release") or "",
        cut=cut_of(words.cut, model, placement, setup, cluster),
    )


def _row(each: dict[str, str]) -> Row:
    number = {
        name: int(each[name]) for name in ("layers", "hidden", "heads", "seq", "tp", "pp", "vp", "dp", "mbs", "gbs")
    }
    model = GPT(number["layers"], number["hidden"], number["heads"], number["seq"], VOCABULARY)
    setup = Setup(
        tensor=number["tp"],
        data=number["dp"],
        microbatch_size=number["mbs"],
        precision=PRECISIONS[each["precision"]],
        checkpoint=cast(Checkpoint, each["recompute"]),
        sequence_parallel=each["recompute"] == "selective",
    )
    microbatches = number["gbs"] // (number["dp"] * number["mbs"])
    cluster = Cluster.of(each["gpu"], network_bandwidth=NETWORK.get(each["source"]))
    seconds = float(each["step_s"])
    return Row(each["source"], model, setup, number["pp"], number["vp"], microbatches, seconds, cluster, "data")
