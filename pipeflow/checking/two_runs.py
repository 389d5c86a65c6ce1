"""Two runs beside each other: the names of both, their tensors put together from the ranks' parts, and the stages of
the candidate. Must not contain: what differs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import cached_property

from pipeflow.checking.exact import measure
from pipeflow.checking.files import Array
from pipeflow.checking.findings import Difference
from pipeflow.checking.matching import Matching, match, wholes
from pipeflow.checking.rounding import Rounding, rounding_of
from pipeflow.checking.rows import Called
from pipeflow.checking.runs import Blocks, Run, Whole
from pipeflow.core.errors import UsageError

Key = tuple[str, int]  # a module and which of its outputs


class TwoRuns:
    """Two runs, the names of both, and how far rounding explains differences.

    Args:
        reference: the plain run.
        candidate: the run that is checked.
        tolerance: relative; None derives one for each value.
        exact: the plain run in a finer dtype, to measure how far rounding goes.

    Raises UsageError if the runs are of different models or numbers of steps.
    """

    def __init__(
        self, reference: Run, candidate: Run, tolerance: float | None = None, exact: Run | None = None
    ) -> None:
        self.reference, self.candidate = reference, candidate
        _require_same_steps(reference, candidate)
        self.names: Matching = match(reference, candidate)
        self._require_same_model()
        self.rounding: Rounding = rounding_of(reference, tolerance)
        if exact is not None:
            measure(self.rounding, reference, exact)
        self.notes: list[str] = []
        self.compared: defaultdict[str, int] = defaultdict(int)
        self._note_names()

    def _require_same_model(self) -> None:
        met = len({*self.names.tensors.values()})
        if not met or met < len(self.names.lacking) / 4:
            theirs = ", ".join(self.names.unmatched[:3]) or "none"
            raise UsageError(
                f"{self.candidate.folder} is a recording of another model than {self.reference.folder}: they share "
                f"{met} tensors, and the candidate's {theirs} have no like; pass names to record if only names differ"
            )

    def _note_names(self) -> None:
        if self.names.lacking:
            self.notes.append(f"the candidate has no {_listed(self.names.lacking)}")
        if self.names.unmatched:
            self.notes.append(f"the reference has no {_listed(self.names.unmatched)}")
        if shapes := [name for name in self.names.unmatched if name in self.names.first]:
            self.notes.append(f"{_listed(shapes)} have other shapes: pass parts to record if ranks have parts of them")

    @cached_property
    def stages(self) -> dict[tuple[int, int], int]:
        """The pipeline stage of each rank of the candidate and each of its modules, by the tensors that it holds; empty
        without stages, whose tensors are others but for tied ones.
        """
        by_place: defaultdict[tuple[int, int], set[str]] = defaultdict(set)
        for rank in self.candidate.ranks:
            for info in rank.tensors.values():
                if (rank.rank, info.name) in self.names.tensors:
                    by_place[rank.rank, info.chunk].add(self.names.tensors[rank.rank, info.name])
        held: defaultdict[frozenset[str], list[tuple[int, int]]] = defaultdict(list)
        for where, names in by_place.items():
            held[frozenset(names)].append(where)
        if len(held) < 2 or any(len(one & other) * 2 > len(one) for one in held for other in held if one != other):
            return {}
        place = {name: index for index, name in enumerate(self.names.first.values())}
        ordered = sorted(held, key=lambda names: sum(place[name] for name in names) / max(1, len(names)))
        return {where: stage for stage, names in enumerate(ordered) for where in held[names]}

    def stage_of(self, ranks: Sequence[int], name: str = "") -> int | None:
        """The stage of these ranks that has a parameter or module; for a module without weights, that of the one around
        it, and for a loss the last.
        """
        while name:
            for rank in ranks:
                for info in self.candidate.ranks[rank].tensors.values():
                    known = self.names.tensors.get((rank, info.name), "")
                    if known == name or known.startswith(f"{name}."):
                        return self.stages.get((rank, info.chunk)) if info.stage is None else info.stage
            name = self.owner(name)
        return max((stage for (rank, _), stage in self.stages.items() if rank in ranks), default=None)

    def of_tensor(self, step: int, what: str, name: str, whole: Whole, error: float, allowed: float) -> Difference:
        """The difference of a parameter, or of a buffer."""
        ranks = tuple(sorted({copy.rank for copy in whole.copies}))
        kinds = self.is_parameter(name)
        module = self.owner(name)
        return Difference(
            step, what if kinds else "buffer", module, name, self.stage_of(ranks, name), ranks, error, allowed
        )

    def is_parameter(self, name: str) -> bool:
        """Whether a tensor of the reference is trained."""
        return any(
            info.parameter for rank in self.reference.ranks for info in rank.tensors.values() if info.name == name
        )

    def owner(self, parameter: str) -> str:
        """The module that owns a parameter."""
        return parameter.rpartition(".")[0]

    def candidate_wholes(self, step: int, kind: str) -> dict[str, Whole]:
        """The candidate's tensors by name in the reference."""
        return wholes(self.candidate, step, kind, self.names)

    def outputs(self, run: Run, step: int) -> dict[Key, list[Called]]:
        """The calls of each module, by name in the reference."""
        found: defaultdict[Key, list[Called]] = defaultdict(list)
        for rank, event in run.events(step, "output"):
            name = event["module"] if run is self.reference else self.names.module(rank, event["module"])
            if run is self.reference or name in self.reference.types:
                found[name, event["place"]].append((rank, event))
        return dict(found)

    def is_whole(self, module: str, calls: Sequence[Called]) -> bool:
        """Whether the ranks of these calls have all of a module, and not a stage of it, or some of its experts."""
        return all(self._holds_all(rank, module) for rank in {rank for rank, _ in calls})

    @cached_property
    def held(self) -> dict[int, set[str]]:
        found: defaultdict[int, set[str]] = defaultdict(set)
        for (rank, _), name in self.names.tensors.items():
            found[rank].add(name)
        return dict(found)

    def _holds_all(self, rank: int, module: str) -> bool:
        """Whether a rank has all of a module, and not a stage of it."""
        start = f"{module}." if module else ""
        inside = {name for name in self.names.first.values() if name.startswith(start)}
        is_leaf = bool(self.reference.types[module].get("leaf"))
        return inside <= self.held.get(rank, set()) and (bool(inside) or is_leaf)

    def places(self, module: str) -> dict[int, Blocks]:
        """For each rank of the candidate, the part that it holds of a module's weight."""
        found = {}
        for (rank, own), name in self.names.tensors.items():
            if self.owner(name) == module and name.endswith("weight"):
                found[rank] = self.candidate.ranks[rank].tensors[own].blocks
        return found

    def changes(self, run: Run, step: int) -> dict[str, tuple[Whole, Array]]:
        """For each parameter, the weight after a step, and the sketch of how the step changed it."""
        names = None if run is self.reference else self.names
        after = wholes(run, step, "after", names)
        before = wholes(run, step - 1, "after", names) if step else wholes(run, 0, "before", names)
        return {name: (whole, whole.sketch - before[name].sketch) for name, whole in after.items() if name in before}

    def gradient_tolerance(self) -> float:
        """The tolerance of gradients, relative to their terms."""
        return self.rounding.gradient()


def _require_same_steps(reference: Run, candidate: Run) -> None:
    if reference.num_steps != candidate.num_steps:
        raise UsageError(
            f"{reference.folder} has {reference.num_steps} steps, {candidate.folder} has {candidate.num_steps}: record "
            "the same steps of both runs"
        )
    if not reference.num_steps:
        raise UsageError(f"{reference.folder} has no step: call the optimizer within the with block of record")


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return ", ".join(names[:4]) + more
