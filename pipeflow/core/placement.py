"""Placement: which rank holds which stage. Must not contain: the order in which stages run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from pipeflow.core.errors import ScheduleError, UsageError, numbers_of, require_type


@dataclass(frozen=True, slots=True)
class Placement:
    """An assignment of stages to ranks.

    A placement has one path, except for bidirectional schedules, which have two. A table of yours may have more: of n
    paths, microbatch m takes path m modulo n. Every stage has one copy of its weights per rank that holds it.

    Attributes:
        paths: per path, the rank of each stage.

    Raises ScheduleError if the paths differ in length or leave a rank without a stage.
    """

    paths: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        given: object = self.paths
        paths = tuple(given) if isinstance(given, Iterable) else (given,)
        if any(isinstance(path, str) or not isinstance(path, Iterable) for path in paths):
            raise ScheduleError(f"a placement is a list of paths, each with the rank of every stage, got {given!r}")
        object.__setattr__(self, "paths", tuple(numbers_of("the ranks of a path", path) for path in paths))
        if not self.paths or any(not path for path in self.paths):
            raise ScheduleError("a placement needs at least one path with at least one stage")
        if len({len(path) for path in self.paths}) > 1:
            raise ScheduleError("the paths of a placement must have the same number of stages")
        held = {rank for path in self.paths for rank in path}
        if held != set(range(len(held))):
            raise ScheduleError(f"the stages of a placement must cover ranks 0..R-1 without a gap, got {sorted(held)}")

    @classmethod
    def linear(cls, ranks: int) -> Placement:
        """One stage per rank, in order."""
        return cls.looped(ranks, 1)

    @classmethod
    def looped(cls, ranks: int, chunks: int) -> Placement:
        """`chunks` stages per rank: stage s is on rank s modulo `ranks`, as in Megatron-LM's interleaving."""
        require_positive(ranks=ranks, chunks=chunks)
        return cls((tuple(stage % ranks for stage in range(ranks * chunks)),))

    @classmethod
    def vee(cls, ranks: int) -> Placement:
        """Two stages per rank: down the ranks, then back up, so rank 0 holds the first and the last stage."""
        return cls.zigzag(ranks, 1)

    @classmethod
    def zigzag(cls, ranks: int, waves: int) -> Placement:
        """`vee` repeated `waves` times, with 2 * `waves` stages per rank. Where the direction turns, a rank holds two
        consecutive stages.
        """
        require_positive(ranks=ranks, waves=waves)
        return cls(((*range(ranks), *reversed(range(ranks))) * waves,))

    @classmethod
    def bidirectional(cls, ranks: int) -> Placement:
        """Two paths of `ranks` stages in opposite directions, as in Chimera and DualPipe."""
        require_positive(ranks=ranks)
        return cls((tuple(range(ranks)), tuple(reversed(range(ranks)))))

    @property
    def num_ranks(self) -> int:
        """The number of pipeline ranks that hold stages."""
        return max(max(path) for path in self.paths) + 1

    @property
    def num_stages(self) -> int:
        """The number of stages that a microbatch passes."""
        return len(self.paths[0])

    @property
    def chunks_per_rank(self) -> float:
        """The average number of stages that one microbatch visits on a rank of its path, which is a rank's whole share
        of the model.
        """
        return self.num_stages / len({*self.paths[0]})

    @property
    def in_turn(self) -> tuple[int, ...]:
        """The ranks in the order of their first stages."""
        return tuple(dict.fromkeys(rank for path in self.paths for rank in path))

    def with_ranks(self, ranks: Sequence[int]) -> Placement:
        """The same placement with `ranks[r]` in the place of rank r."""
        return Placement(tuple(tuple(ranks[rank] for rank in path) for path in self.paths))

    def rank_of(self, stage: int, microbatch: int = 0) -> int:
        """The rank that runs `stage` for `microbatch`."""
        return self.paths[microbatch % len(self.paths)][stage]

    def ranks_of(self, stage: int) -> tuple[int, ...]:
        """The ranks that hold a copy of `stage`, in ascending order: at most one for each path."""
        return tuple(sorted({path[stage] for path in self.paths}))

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages that `rank` holds, in ascending order. The index of a stage in this tuple is its chunk."""
        return _held(self.paths).get(rank, ())

    def chunk_of(self, stage: int, microbatch: int = 0) -> int:
        """The index of `stage` among the stages of the rank that runs it for `microbatch`."""
        return self.stages_of(self.rank_of(stage, microbatch)).index(stage)


@lru_cache(maxsize=256)
def _held(paths: tuple[tuple[int, ...], ...]) -> dict[int, tuple[int, ...]]:
    """Per rank the stages that it holds: a search asks for the same placement ten thousand times."""
    held: dict[int, set[int]] = {}
    for path in paths:
        for stage, rank in enumerate(path):
            held.setdefault(rank, set()).add(stage)
    return {rank: tuple(sorted(stages)) for rank, stages in held.items()}


def require_placement(placement: object) -> None:
    """Raises UsageError for anything that is no Placement, such as a number of ranks."""
    require_type("placement", placement, Placement, f"Placement.linear({placement!r}) has one stage per rank")


def require_positive(**arguments: int) -> None:
    """Raises UsageError unless every argument is an integer of at least 1."""
    require_at_least(1, **arguments)


def require_at_least(least: int, **arguments: int) -> None:
    """Raises UsageError unless every argument is an integer of at least `least`."""
    for name, value in arguments.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise UsageError(f"{name} must be an integer of at least {least}, got {value!r}")


def stages_among(placement: Placement, stages: Iterable[int] | None) -> frozenset[int]:
    """The stages, or all of a placement. Raises UsageError for a stage that does not exist."""
    known = range(placement.num_stages)
    stages = known if stages is None else numbers_of("stages", stages)
    if wrong := sorted({*stages} - {*known}):
        raise UsageError(f"there is no stage {wrong[0]}: the schedule has stages 0 to {len(known) - 1}")
    return frozenset(stages)
