"""Layout: how a model is laid out over devices, as a value, and what a search for one is asked for. Must not contain:
the search, and what layouts cost.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any, cast

from pipeflow.core.errors import UsageError, names_of, require_type, unknown
from pipeflow.core.partition import Part
from pipeflow.core.placement import require_positive
from pipeflow.core.schedule import Schedule
from pipeflow.planning.blocks import Transformer, near_divisors
from pipeflow.planning.cluster import Cluster
from pipeflow.planning.device_map import map_devices
from pipeflow.planning.estimate import require_inputs, require_sliceable
from pipeflow.planning.setup import Checkpoint, ContextKind, Setup
from pipeflow.planning.sharding import require_pipeline
from pipeflow.schedules import SCHEDULES, make_schedule
from pipeflow.schedules.registry import COMPARED, OTHER_NAMES, is_searched
from pipeflow.schedules.zb_auto import kinds_named

GIVEN = ("tensor", "pipeline", "context", "expert", "expert_tensor", "microbatch_size")  # sizes that may be fixed
SEARCHED = tuple(name for name in COMPARED if not is_searched(name))
"""The schedules that are tried unless others are named: those compared, but for those that are searched for."""


GROUPS = 3  # kinds of groups that a search forms: tensor ranks, pipeline ranks, replicas


@dataclass(frozen=True, slots=True)
class Layout:
    """One way to train a model on a number of devices.

    Attributes:
        setup: the work of a pipeline rank; its sizes, `checkpoint` and `zero` can be read from the layout, too.
        pipeline: number of pipeline ranks.
        microbatches: number of microbatches per step and replica.
        schedule, options: a name in SCHEDULES, and the schedule's options.
        cut: per stage, its layers [start, end).
    """

    setup: Setup
    pipeline: int
    microbatches: int
    schedule: str
    options: Mapping[str, Any] = field(hash=False)
    cut: tuple[Part, ...]

    @property
    def tensor(self) -> int:
        return self.setup.tensor

    @property
    def data(self) -> int:
        return self.setup.data

    @property
    def context(self) -> int:
        return self.setup.context

    @property
    def expert(self) -> int:
        return self.setup.expert

    @property
    def microbatch_size(self) -> int:
        return self.setup.microbatch_size

    @property
    def checkpoint(self) -> Checkpoint:
        return cast("Checkpoint", self.setup.checkpoint)

    @property
    def zero(self) -> int:
        return self.setup.zero

    @property
    def shard_ranks(self) -> int | None:
        return self.setup.shard_ranks

    @property
    def sequence_parallel(self) -> bool:
        return self.setup.sequence_parallel

    @property
    def overlap(self) -> bool:
        return self.setup.overlaps

    def make_schedule(self) -> Schedule:
        """Makes the schedule of the layout."""
        return make_schedule(self.schedule, ranks=self.pipeline, microbatches=self.microbatches, **self.options)


@dataclass(frozen=True, slots=True)
class Wanted:
    """The task of a search: the fastest layouts that train `model` on `devices` of a cluster.

    Attributes:
        model, cluster, devices: what is trained, and on what.
        batch: sequences per step, on all devices together.
        memory: the most bytes of a device in a plan; by default the device's memory minus ALLOWANCE, a context, and a
            communicator for as many kinds of groups as the devices can form. Of several kinds of devices, each has at
            most this default.
        setup: the sequence, the precision, the program, and how activations are kept; its other fields are not used.
        tensor, pipeline, context, expert, expert_tensor, microbatch_size, checkpoint, zero, sequence_parallel, overlap:
            if given, all layouts have these values.
        context_kind: the same for how attention sees the tokens of other context ranks.
        shard_ranks: the replicas that hold together what `zero` divides, in all layouts; by default all of them, or
            with ZeRO-3 and without a pipeline those of a node.
        schedules: names to try; by default SEARCHED, and with `kinds` also "zb-auto".
        kinds: what may save memory in orders that are searched for: "offload", "recompute", "both" or "none".
        slices: into how many slices of a sequence microbatches are cut. Then the layouts with several pipeline ranks
            have a schedule that cuts them, no ring of context ranks, and no ZeRO-3 over context ranks. None: in such
            layouts of causal models, those of SLICES are tried in which a slice has SLICE tokens.

    Raises UsageError for sizes below 1, more pipeline ranks than layers, no schedule or an unknown one, an unknown
    `checkpoint`, `zero` or `kinds`, offloads of a device without `host_bandwidth`, and more devices than there are.
    """

    model: Transformer
    cluster: Cluster
    devices: int
    batch: int
    _: KW_ONLY
    memory: float | None = None
    setup: Setup = field(default_factory=Setup)
    tensor: int | None = None
    pipeline: int | None = None
    context: int | None = None
    expert: int | None = None
    expert_tensor: int | None = None
    microbatch_size: int | None = None
    checkpoint: Checkpoint | None = None
    zero: int | None = None
    sequence_parallel: bool | None = None
    overlap: bool | None = None
    context_kind: ContextKind | None = None
    shard_ranks: int | None = None
    schedules: tuple[str, ...] = SEARCHED
    kinds: str = "none"
    slices: int | None = None

    def __post_init__(self) -> None:
        require_inputs(self.model, self.setup, self.cluster)
        require_type("cluster", self.cluster, Cluster, "Cluster.of(device) has a cluster by the name of its device")
        optional = {name: getattr(self, name) for name in GIVEN}
        given = {name: size for name, size in optional.items() if size is not None}
        slices = 1 if self.slices is None else self.slices
        require_positive(devices=self.devices, batch=self.batch, slices=slices, **given)
        ways: dict[str, Any] = {"zero": self.zero or 0, "context_kind": self.context_kind or "gather"}
        require_sliceable(self.model, replace(self.setup, context=self.context or 1, **ways), slices)
        if self.pipeline is not None and self.pipeline > self.model.layers:
            raise UsageError(
                f"{self.model.layers} layers cannot fill {self.pipeline} pipeline ranks: "
                f"use at most {self.model.layers}"
            )
        if self.memory is not None and not self.memory > 0:
            raise UsageError(f"memory must be a positive number of bytes, got {self.memory!r}")
        object.__setattr__(self, "schedules", names_of("schedules", self.schedules))
        if not self.schedules:
            raise UsageError("there is no schedule to try: name at least one")
        for name in self.schedules:
            if name not in SCHEDULES:
                raise unknown("schedule", name, SCHEDULES, OTHER_NAMES)
        require_pipeline(self.zero, self.pipeline)
        if self.shard_ranks is not None:
            self._require_shards(self.shard_ranks)
        saving = kinds_named(self.kinds)
        for kind, _ in self.cluster.taken(self.devices):
            if "offload" in saving and not kind.device.host_bandwidth:
                raise UsageError(
                    f"device {kind.device.name!r} has no host_bandwidth, which copies to the host take: give it in "
                    "the cluster file, or use kinds recompute"
                )
        if saving and "zb-auto" not in self.schedules:
            object.__setattr__(self, "schedules", (*self.schedules, "zb-auto"))
        if self.expert is not None:
            self.model.expert_parameters(self.expert, self.expert_tensor or 1)

    def _require_shards(self, ranks: int) -> None:
        require_positive(shard_ranks=ranks)
        if self.zero == 0:
            raise UsageError(f"shard_ranks={ranks} divides nothing with zero=0: give zero 1, 2 or 3, or leave it out")
        if self.devices % ranks:
            near = near_divisors(self.devices, ranks)
            raise UsageError(f"shard_ranks={ranks} does not divide {self.devices} devices: {near}")

    @property
    def without_kinds(self) -> Wanted:
        """The same task without kinds that save memory, and without schedules that are searched for if there are
        others.
        """
        if self.kinds == "none":
            return self
        named = tuple(name for name in self.schedules if not is_searched(name))
        return replace(self, kinds="none", schedules=named or self.schedules)

    @property
    def limit(self) -> float:
        """The most bytes of a device in a plan; of several kinds, of the one with most."""
        return max(self.limit_of(kind) for kind, _ in self.cluster.taken(self.devices))

    def limit_of(self, kind: Cluster) -> float:
        """The most bytes of a device of one kind. One of several kinds never gets more than it has."""
        groups = min(GROUPS, _prime_factors(self.devices))
        own = kind.usable_bytes - kind.outside_bytes(groups)
        if self.memory is None:
            return own
        return min(own, self.memory) if self.cluster.further else self.memory

    def lacking(self, setup: Setup, pipeline: int) -> tuple[float, ...]:
        """Per pipeline rank, by how many bytes its devices have less than `limit`."""
        if not self.cluster.further:
            return (0.0,) * pipeline
        mapped, most = map_devices(self.cluster, setup, pipeline), self.limit
        limits = [self.limit_of(kind) for kind in mapped.kinds]
        return tuple(most - min(limits[kind] for kind in kinds) for kinds in mapped.ranks)

    @property
    def checkpoints(self) -> tuple[Checkpoint, ...]:
        """The kinds of recomputation to try, the lightest first. Without stored scores, recomputing them saves nothing
        and is left out.
        """
        if self.checkpoint is not None:
            return (self.checkpoint,)
        if self.setup.recompute_modules:
            return ("none",)
        return ("none", "selective", "full") if self.setup.stores_scores else ("none", "full")


def _prime_factors(number: int) -> int:
    """How many prime factors a number has: that many sizes above 1 can have it as their product."""
    found, divisor = 0, 2
    while number > 1:
        if number % divisor:
            divisor += 1
        else:
            number //= divisor
            found += 1
    return found
