"""Causes of wrong outputs: what the first wrong rows of the candidate are in terms of the reference's rows."""

from __future__ import annotations

from collections import defaultdict
from math import prod

import numpy as np

from pipeflow.checking.differences import output
from pipeflow.checking.files import Array
from pipeflow.checking.findings import Cause, Difference
from pipeflow.checking.fits import as_times, fit, named, spread_of
from pipeflow.checking.gradient_causes import precision
from pipeflow.checking.limits import CLEAR, COARSE, NEAR, SAME_ROWS, SUMMED, TINY, unit
from pipeflow.checking.rows import OutputRows, joined, unmatched
from pipeflow.checking.two_runs import Key, TwoRuns, norm


class Outputs:
    """The first wrong output of a step, in both runs.

    Args:
        both: the runs.
        first: the difference.
    """

    def __init__(self, both: TwoRuns, first: Difference) -> None:
        self.both, self.first = both, first
        mine = both.outputs(both.reference, first.step)
        theirs = both.outputs(both.candidate, first.step)
        keys = [key for key in mine if key[0] == first.module and key in theirs]
        wrong = (key for key in keys if output(both, first.step, key, mine[key], theirs[key]) is not None)
        self.key: Key = next(wrong, keys[0])
        self.mine, self.theirs = mine[self.key], theirs[self.key]
        self.sizes = both.counts(first.step)
        self.tail = max((tuple(event["shape"][1:]) for _, event in self.mine), key=prod)

    def cause(self) -> Cause:
        """The first explanation that holds."""
        rows, others = joined(self.mine, self.tail), joined(self.theirs, self.tail)
        found = self._dropped() or self._partial() or self._statistics()
        if found is None and rows is not None and others is not None:
            found = self._rows(rows, others)
        return (
            found
            or self._coarse(others is not None)
            or self._split()
            or self._divided()
            or Cause(
                "unknown",
                f"the output of {self.first.module} is {self.first.error:.1%} off; its inputs are right",
                f"the forward of {self.first.module}, and what its parallel form does otherwise",
            )
        )

    def _dropped(self) -> Cause | None:
        runs = (self.both.reference, self.both.candidate)
        if not any(run.types.get(self.first.module, {}).get("drops") for run in runs):
            return None
        states = [run.ranks[0].start.get("random") for run in runs]
        seeds = "; the random states differ as the runs begin" if states[0] != states[1] else ""
        return Cause(
            "dropout",
            f"{self.first.module} drops values at random, and is the first whose outputs differ{seeds}",
            "seeds and generators of ranks and microbatches; compare without dropout first",
        )

    def _partial(self) -> Cause | None:
        """Ranks whose outputs add up to the reference's."""
        module = self.first.module
        if not self.first.partial and not self._sums(module):
            return None
        ranks = sorted({rank for rank, _ in self.theirs})
        return Cause(
            "missing_reduction",
            f"the outputs of {module} on ranks {', '.join(map(str, ranks))} are terms that add up to the reference's",
            f"the all-reduce after {module}",
        )

    def _sums(self, module: str) -> bool:
        by_call: defaultdict[int, list[Array]] = defaultdict(list)
        for _, event in self.theirs:
            by_call[event["call"]].append(event["rows"])
        groups = [*by_call.values()]
        if any(len(each) < 2 or len({one.shape for one in each}) > 1 for each in groups):
            return False
        rows = joined(self.mine, self.tail)
        total = OutputRows(np.concatenate([np.sum(each, axis=0) for each in groups]), [], [], self.tail)
        return rows is not None and not unmatched(rows, total, SUMMED * self.first.allowed).reference

    def _rows(self, rows: OutputRows, others: OutputRows) -> Cause | None:
        return (
            self._repeated(rows, others)
            or self._earlier(others)
            or self._multiples(rows, others)
            or self._added(rows, others)
            or self._elsewhere(rows, others)
        )

    def _repeated(self, rows: OutputRows, others: OutputRows) -> Cause | None:
        """Rows of the reference that are missing, while no row is unknown."""
        apart = unmatched(rows, others, self.first.allowed)
        if apart.candidate:
            return None
        return Cause(
            "missing_microbatch",
            f"{len(apart.reference)} of {len(rows.values)} rows of the outputs of {self.first.module} never come",
            "which microbatches the schedule runs, and what is received for each",
        )

    def _earlier(self, others: OutputRows) -> Cause | None:
        """Rows of the step before."""
        if not self.first.step:
            return None
        before = self.both.outputs(self.both.reference, self.first.step - 1).get(self.key, [])
        old = joined(before, self.tail)
        if old is None or unmatched(old, others, self.first.allowed).candidate:
            return None
        step = self.first.step - 1
        return Cause(
            "stale",
            f"the outputs of {self.first.module} are those of step {step}",
            "buffers and weights that are read before they are new",
        )

    def _pairs(self, rows: OutputRows, others: OutputRows) -> list[tuple[Array, Array]]:
        """Rows of the reference beside those of the candidate: by what the rows of earlier modules say, or in order."""
        known = self._places()
        mine = rows.values[:, :8]
        seen: defaultdict[tuple[tuple[int, ...], int], int] = defaultdict(int)
        taken: defaultdict[tuple[int, ...], int] = defaultdict(int)
        found = []
        for index, (ranks, call) in enumerate(zip(others.ranks, others.calls, strict=True)):
            place = known.get((ranks[0], call, seen[ranks, call]), taken[ranks] % len(mine))
            seen[ranks, call] += 1
            taken[ranks] += 1
            found.append((mine[place], others.values[index, :8]))
        return found

    def _places(self) -> dict[tuple[int, int, int], int]:
        """For rank, call and row of the candidate, the row of the reference: from the last output that is alike."""
        step, both = self.first.step, self.both
        theirs = both.outputs(both.candidate, step)
        found: dict[tuple[int, int, int], int] = {}
        for key, events in both.outputs(both.reference, step).items():
            if key == self.key:
                break
            rows = joined(events, max((tuple(event["shape"][1:]) for _, event in events), key=prod))
            if (
                rows is None
                or key not in theirs
                or len(rows.values) != sum(event["shape"][0] for _, event in self.mine)
            ):
                continue
            for rank, event in theirs[key]:
                if event["rows"].shape[1:] == rows.values.shape[1:] and tuple(event["shape"][1:]) == rows.tail:
                    for index, row in enumerate(event["rows"]):
                        apart = np.sum(np.square(rows.values[:, :8] - row[:8]), axis=1)
                        found[rank, event["call"], index] = int(apart.argmin())
        return found

    def _multiples(self, rows: OutputRows, others: OutputRows) -> Cause | None:
        """Rows that are multiples of what they must be."""
        fits = [fit(mine, row) for mine, row in self._pairs(rows, others)]
        wrong = [each for each in fits if abs(each.factor - 1.0) > max(NEAR, 2 * self.first.allowed)]
        if not wrong or any(each.error > max(CLEAR, 3 * self.first.allowed) for each in wrong):
            return None
        factors = [each.factor for each in wrong]
        if spread_of(factors) > NEAR:
            return None
        why = named(factors[0], self.sizes)
        times = f"{as_times(factors[0])} the reference's{f', {why}' if why else ''}"
        some = "" if len(wrong) == len(fits) else f"{len(wrong)} of {len(fits)} rows of "
        return Cause(
            "scale",
            f"{some}the outputs of {self.first.module} are {times}",
            "what is divided or multiplied by a number of ranks or microbatches there, and a sum that must be a mean",
            round(factors[0], 6),
        )

    def _added(self, rows: OutputRows, others: OutputRows) -> Cause | None:
        """Rows that are off by one and the same: a bias that is added several times, or never."""
        apart = np.array([row - mine for mine, row in self._pairs(rows, others)])
        common = np.median(apart, axis=0)
        if f"{self.first.module}.bias" not in self.both.names.first or norm(apart - common) > CLEAR * norm(common):
            return None
        return Cause(
            "scale",
            f"every row of {self.first.module} is off by the same values: its bias counts too often, or never",
            "on which ranks the bias is added: before or after the sum over ranks",
        )

    def _elsewhere(self, rows: OutputRows, others: OutputRows) -> Cause | None:
        """Rows with the right values at other places."""
        if self.first.error < COARSE:
            return None
        mine, theirs = (np.sort(each.values[:, 8]) for each in (rows, others))
        many = len(theirs) // len(mine)
        if many * len(mine) != len(theirs) or np.max(np.abs(theirs[::many] / np.maximum(mine, TINY) - 1.0)) > SAME_ROWS:
            return None
        return Cause(
            "sharding",
            f"the outputs of {self.first.module} have the reference's values, but at other places of their rows",
            "how parts are gathered: along which dimension, and in which order of ranks",
        )

    def _split(self) -> Cause | None:
        """A layer with parts on several ranks, whose inputs are right."""
        ranks = self.both.places(self.first.module)
        if len(set(ranks.values())) < 2:
            return None
        listed = ", ".join(map(str, sorted(ranks)))
        return Cause(
            "sharding",
            f"{self.first.module} is split over ranks {listed}, its inputs are right, and its outputs are not",
            "which part of its weight each rank takes for its own, and masks for what is on other ranks",
        )

    def _divided(self) -> Cause | None:
        """Ranks that compute a part of each row, such as some of its tokens, from inputs that are right."""
        shapes = {tuple(event["shape"][1:]) for _, event in self.theirs}
        if self.tail in shapes:
            return None
        listed = " and ".join(str(list(shape)) for shape in sorted(shapes))
        return Cause(
            "sharding",
            f"ranks have parts {listed} of the rows {list(self.tail)} of {self.first.module}, whose norm is wrong",
            "positions and masks of each part, and what it needs of the parts of other ranks",
        )

    def _statistics(self) -> Cause | None:
        """A norm over samples whose ranks or microbatches have statistics of their own."""
        module = self.first.module
        if f"{module}.running_mean" not in self.both.names.first or len(self.theirs) <= len(self.mine):
            return None
        return Cause(
            "missing_reduction",
            f"{module} normalizes over samples, whose statistics are those of {len(self.theirs)} calls instead of "
            f"{len(self.mine)}",
            "batch norms: each replica and microbatch has its own mean and variance unless they are synchronized",
        )

    def _used_before(self) -> Cause | None:
        """A layer that was right in the step before, with the same inputs and weights."""
        weights = [name for name in self.both.names.first if self.both.owner(name) == self.first.module]
        if not self.first.step or not weights:
            return None
        return Cause(
            "stale",
            f"{self.first.module} has the right weights and inputs, was right in step {self.first.step - 1}, and is "
            f"{self.first.error:.2%} off now, after its weights changed",
            "copies of the weight that are not made again: caches, casts, and gathers that came before the step",
        )

    def _coarse(self, has_rows: bool) -> Cause | None:
        """Errors like those of a dtype with fewer bits."""
        dtypes = {event["dtype"] for _, event in self.theirs}
        coarse = max(map(unit, dtypes)) > max(unit(event["dtype"]) for _, event in self.mine)
        if coarse:
            names = ", ".join(each.removeprefix("torch.") for each in sorted(dtypes))
            return precision(
                f"the outputs of {self.first.module} are {names} in the candidate, and {self.first.error:.2%} off"
            )
        if stale := self._used_before():
            return stale
        if self.first.error < COARSE and has_rows:
            return precision(
                f"the outputs of {self.first.module} are {self.first.error:.2%} off, as in a coarser dtype"
            )
        return None
