"""Causes of wrong outputs: what the first wrong rows of the candidate are in terms of the reference's rows."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from functools import cached_property
from math import prod

import numpy as np

from pipeflow.checking.differences import output
from pipeflow.checking.files import INPUT, INSIDE, Array
from pipeflow.checking.findings import Difference, Evidence, explains
from pipeflow.checking.fits import DTYPES, as_times, fit, named, spread_of
from pipeflow.checking.limits import CLEAR, COARSE, NEAR, SAME_ROWS, SUMMED, TINY, unit
from pipeflow.checking.runs import Called, RecordedRun, Unmatched, joined, norm, owner, summed, unmatched
from pipeflow.checking.two_runs import TwoRuns

FORMULA = "what is computed there: the function, its mask, its scale, its eps and other arguments"


class Outputs:
    """The first wrong output of a step, in both runs.

    Args:
        both: the runs.
        first: the difference.
    """

    def __init__(self, both: TwoRuns, first: Difference) -> None:
        self.both, self.first, self.name, self.step = both, first, first.module, first.step
        mine, theirs = (run.outputs(self.step) for run in both.runs)
        noted = f"{self.name}{INSIDE}{INPUT}" if first.what == "input" else self.name
        keys = [key for key in mine if key[0] == noted and key in theirs]
        wrong = (key for key in keys if output(both, self.step, key, mine[key], theirs[key]) is not None)
        self.key = next(wrong, keys[0])
        self.mine, self.theirs = mine[self.key], theirs[self.key]
        self.tail = max((tuple(event["shape"][1:]) for _, event in self.mine), key=prod)
        self.rows, self.others = joined(self.mine, self.tail), joined(self.theirs, self.tail)
        self.are_inputs_alike = both.are_inputs_alike(self.step, self.mine, self.theirs)
        self.inputs = "its inputs are right" if self.are_inputs_alike else "its inputs were not all compared"

    @cached_property
    def apart(self) -> Unmatched | None:
        """The rows without a like; None if it is not known how the parts of rows lie."""
        if self.rows is None or self.others is None:
            return None
        return unmatched(self.rows, self.others, self.first.allowed)

    @cached_property
    def pairs(self) -> list[tuple[Array, Array]]:
        """Rows of the reference beside those of the candidate: by what the rows of earlier modules say, or in order."""
        if self.rows is None or self.others is None:
            return []
        known = self._places()
        mine = self.rows.values[:, :8]
        seen: defaultdict[tuple[tuple[int, ...], int], int] = defaultdict(int)
        taken: defaultdict[tuple[int, ...], int] = defaultdict(int)
        found = []
        for index, (ranks, call) in enumerate(zip(self.others.ranks, self.others.calls, strict=True)):
            place = known.get((ranks[0], call, seen[ranks, call]), taken[ranks] % len(mine))
            seen[ranks, call] += 1
            taken[ranks] += 1
            found.append((mine[place], self.others.values[index, :8]))
        return found

    def _places(self) -> dict[tuple[int, int, int], int]:
        """For rank, call and row of the candidate, the row of the reference: from the last output that is alike."""
        theirs = self.both.candidate.outputs(self.step)
        samples = sum(event["shape"][0] for _, event in self.mine)
        found: dict[tuple[int, int, int], int] = {}
        for key, events in self.both.reference.outputs(self.step).items():
            if key == self.key:
                break
            rows = joined(events, max((tuple(event["shape"][1:]) for _, event in events), key=prod))
            if rows is None or key not in theirs or len(rows.values) != samples:
                continue
            for rank, event in theirs[key]:
                if event["rows"].shape[1:] == rows.values.shape[1:] and tuple(event["shape"][1:]) == rows.tail:
                    for index, row in enumerate(event["rows"]):
                        apart = np.sum(np.square(rows.values[:, :8] - row[:8]), axis=1)
                        found[rank, event["call"], index] = int(apart.argmin())
        return found

    @explains("dropout", "seeds and generators of ranks and microbatches; compare without dropout first")
    def _dropped(self) -> Evidence:
        runs = self.both.runs
        if not any(run.types.get(self.name, {}).get("drops") for run in runs):
            return None
        states = [run.ranks[0].start.get("random") for run in runs]
        seeds = "; the random states differ as the runs begin" if states[0] != states[1] else ""
        return f"{self.name} drops values at random, and is the first whose outputs differ{seeds}"

    @explains("missing_reduction", "the all-reduce after {self.name}")
    def _partial(self) -> Evidence:
        """Ranks whose outputs add up to the reference's."""
        if not self.first.partial and not self._add_up():
            return None
        ranks = ", ".join(map(str, sorted({rank for rank, _ in self.theirs})))
        return f"the outputs of {self.name} on ranks {ranks} are terms that add up to the reference's"

    def _add_up(self) -> bool:
        by_call: defaultdict[int, list[Called]] = defaultdict(list)
        for rank, event in self.theirs:
            by_call[event["call"]].append((rank, event))
        total = summed([*by_call.values()], self.tail)
        if self.rows is None or total is None or min(map(len, by_call.values())) < 2:
            return False
        return not unmatched(self.rows, total, SUMMED * self.first.allowed).reference

    @explains(
        "missing_reduction",
        "batch norms: each replica and microbatch has its own mean and variance unless they are synchronized",
    )
    def _statistics(self) -> Evidence:
        """A norm over samples whose ranks or microbatches have statistics of their own."""
        if f"{self.name}.running_mean" not in self.both.reference.first or len(self.theirs) <= len(self.mine):
            return None
        calls = f"those of {len(self.theirs)} calls instead of {len(self.mine)}"
        return f"{self.name} normalizes over samples, whose statistics are {calls}"

    @explains("missing_microbatch", "which microbatches the schedule runs, and what is received for each")
    def _repeated(self) -> Evidence:
        """Rows of the reference that are missing, while no row is unknown."""
        if self.rows is None or self.apart is None or self.apart.candidate:
            return None
        return f"{len(self.apart.reference)} of {len(self.rows.values)} rows of the outputs of {self.name} never come"

    @explains("stale", "buffers and weights that are read before they are new")
    def _earlier(self) -> Evidence:
        """Rows of the step before."""
        if not self.step or self.apart is None or self.others is None:
            return None
        old = joined(self.both.reference.outputs(self.step - 1).get(self.key, []), self.tail)
        if old is None or unmatched(old, self.others, self.first.allowed).candidate:
            return None
        return f"the outputs of {self.name} are those of step {self.step - 1}"

    @explains("formula", FORMULA)
    def _other_arguments(self) -> Evidence:
        """A function with other arguments, or a module with other settings."""
        found = [*self._apart(*(each[0][1].get("arguments", {}) for each in (self.mine, self.theirs)))]
        if self.first.what == "output":
            found = [*self._apart(*(run.types.get(self.name, {}).get("settings", {}) for run in self.both.runs))]
        masks = [float(each[0][1]["marks"].flat[0]) for each in (self.mine, self.theirs) if "marks" in each[0][1]]
        if not found and len(masks) == 2 and abs(masks[0] - masks[1]) > SAME_ROWS:
            found = [
                f"its mask has {masks[1]:.1%} of its entries in the candidate, and {masks[0]:.1%} in the reference"
            ]
        return f"of {self.name}, {' and '.join(found)}" if found else None

    def _apart(self, mine: Mapping[str, object], theirs: Mapping[str, object]) -> Iterator[str]:
        """What is another in the candidate, in words."""
        for key in mine.keys() & theirs.keys():
            if mine[key] != theirs[key]:
                what = f"argument {key}" if key.isdigit() else key
                yield f"{what} is {theirs[key]!r} in the candidate, and {mine[key]!r} in the reference"

    @explains("formula", FORMULA)
    def _other_functions(self) -> Evidence:
        """Other functions of the module whose code computes an input."""
        if self.first.what == "output":
            return None
        module = owner(self.name) if self.first.what == "input" else self.name.partition(INSIDE)[0]
        mine, theirs = (self._functions(run, module) for run in self.both.runs)
        only, others = sorted(mine - theirs), sorted(theirs - mine)
        if not only or not others:
            return None
        return f"{module} calls {', '.join(others)} in the candidate, and {', '.join(only)} in the reference"

    def _functions(self, run: RecordedRun, module: str) -> set[str]:
        names = (name.partition(INSIDE) for name, _ in run.outputs(self.step))
        return {inside.partition(" #")[0] for name, _, inside in names if name == module and inside not in ("", INPUT)}

    @explains(
        "scale",
        "what is divided or multiplied by a number of ranks or microbatches there, and a sum that must be a mean",
    )
    def _multiples(self) -> Evidence:
        """Rows that are multiples of what they must be."""
        fits = [fit(mine, row) for mine, row in self.pairs]
        wrong = [each for each in fits if abs(each.factor - 1.0) > max(NEAR, 2 * self.first.allowed)]
        if not wrong or any(each.error > max(CLEAR, 3 * self.first.allowed) for each in wrong):
            return None
        factors = [each.factor for each in wrong]
        if spread_of(factors) > NEAR:
            return None
        why = named(factors[0], self.both.counts(self.step))
        some = "" if len(wrong) == len(fits) else f"{len(wrong)} of {len(fits)} rows of "
        times = f"{as_times(factors[0])} the reference's{f', {why}' if why else ''}"
        return f"{some}the outputs of {self.name} are {times}", factors[0]

    @explains("scale", "on which ranks the bias is added: before or after the sum over ranks")
    def _added(self) -> Evidence:
        """Rows that are off by one and the same: a bias that is added several times, or never."""
        if len(self.pairs) < 2 or f"{self.name}.bias" not in self.both.reference.first:
            return None
        apart = np.array([row - mine for mine, row in self.pairs])
        common = np.median(apart, axis=0)
        if norm(apart - common) > CLEAR * norm(common):
            return None
        return f"every row of {self.name} is off by the same values: its bias counts too often, or never"

    @explains("sharding", "how parts are gathered: along which dimension, and in which order of ranks")
    def _elsewhere(self) -> Evidence:
        """Rows with the right values at other places."""
        is_divided = self.first.what == "output" or self.both.has_parts_of_rows(self.step)
        if self.rows is None or self.others is None or self.first.error < COARSE or not is_divided:
            return None
        mine, theirs = (np.sort(each.values[:, 8]) for each in (self.rows, self.others))
        many = len(theirs) // len(mine)
        if many * len(mine) != len(theirs) or spread_of([*mine]) < NEAR:  # rows of a norm are of one size
            return None
        if np.max(np.abs(theirs[::many] / np.maximum(mine, TINY) - 1.0)) > min(SAME_ROWS, 4 * self.first.allowed):
            return None
        return f"the outputs of {self.name} have the reference's values, but at other places of their rows"

    @explains("precision", DTYPES)
    def _coarse_dtype(self) -> Evidence:
        dtypes = {event["dtype"] for _, event in self.theirs}
        if max(map(unit, dtypes)) <= max(unit(event["dtype"]) for _, event in self.mine):
            return None
        names = ", ".join(each.removeprefix("torch.") for each in sorted(dtypes))
        return f"the outputs of {self.name} are {names} in the candidate, and {self.first.error:.2%} off"

    @explains(
        "stale",
        "copies of the weight that are not made again: caches, casts, and gathers that came before the step",
    )
    def _used_before(self) -> Evidence:
        """A layer that was right in the step before, with the same inputs and weights."""
        own = {first for name, first in self.both.reference.first.items() if owner(name) == self.name}
        if not self.step or not own or not own <= self.both.weights or not self.are_inputs_alike:
            return None
        return (
            f"{self.name} has the right weights and inputs, was right in step {self.step - 1}, and is "
            f"{self.first.error:.2%} off now, after its weights changed"
        )

    @explains("precision", DTYPES)
    def _coarse_values(self) -> Evidence:
        if self.first.error >= COARSE or self.others is None:
            return None
        return f"the outputs of {self.name} are {self.first.error:.2%} off, as in a coarser dtype"

    @explains("sharding", "which part of its weight each rank takes for its own, and masks for what is on other ranks")
    def _split(self) -> Evidence:
        """A layer with parts on several ranks, whose inputs are right."""
        ranks = self.both.places(self.name)
        if len(set(ranks.values())) < 2:
            return None
        listed = ", ".join(map(str, sorted(ranks)))
        return f"{self.name} is split over ranks {listed}; {self.inputs}, and its outputs are wrong"

    @explains("sharding", "positions and masks of each part, and what it needs of the parts of other ranks")
    def _divided(self) -> Evidence:
        """Ranks that compute a part of each row, such as some of its tokens, from inputs that are right."""
        shapes = {tuple(event["shape"][1:]) for _, event in self.theirs}
        if self.tail in shapes or self.first.what != "output":
            return None
        listed = " and ".join(str(list(shape)) for shape in sorted(shapes))
        return f"ranks have parts {listed} of the rows {list(self.tail)} of {self.name}, whose norm is wrong"
