"""Causes of wrong gradients: what the candidate's gradients are in terms of the reference's, of its samples, of the
step before, and of each other.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import partial

import numpy as np

from pipeflow.checking.files import Array
from pipeflow.checking.findings import Cause, Difference
from pipeflow.checking.fits import Fit, as_times, cause_of, fit, listed, named, root_named, spread_of, weights_of
from pipeflow.checking.limits import (
    CLEAR,
    COUNTS,
    DISAGREES,
    LESS_PRECISE,
    LOSS_LESS_PRECISE,
    NEAR,
    NO_FACTOR,
    PARTLY,
    SAME_VALUES,
    TINY,
    unit,
)
from pipeflow.checking.two_runs import TwoRuns, WholeTensor, norm, wholes


class StepGradients:
    """The gradients of a step in both runs.

    Args:
        both: the runs.
        found: all differences of the step; the first of a gradient is explained.
    """

    def __init__(self, both: TwoRuns, found: Sequence[Difference]) -> None:
        self.both = both
        self.wrong = [each for each in found if each.what == "gradient"]
        self.of_loss = max((each.error for each in found if each.what == "loss"), default=0.0)
        self.first = self.wrong[0]
        self.step = self.first.step
        self.kind = "unclipped" if self._differs("unclipped") else "gradient"
        self.mine = both.mine(self.step, self.kind)
        self.theirs = both.theirs(self.step, self.kind)
        self.sizes = both.counts(self.step)

    def cause(self) -> Cause | None:
        """The first explanation that holds."""
        for explain in (
            self._absent,
            self._copies,
            self._stale,
            partial(self._factor, same=True),
            self._samples,
            self._clipped,
            self._factor,
            self._places,
            self._recomputed,
            self._precision,
        ):
            found = explain()
            if found is not None:
                return found
        return self._tie_alone()

    @property
    def name(self) -> str:
        return self.first.parameter

    def _absent(self) -> Cause | None:
        if self.name in self.theirs:
            return None
        if self.name in self.both.names.ties:
            return _tie(self.name, "the candidate has no gradient for it")
        return Cause("unknown", f"{self.name} has no gradient in the candidate", "whether the loss reaches this module")

    def _copies(self) -> Cause | None:
        """Copies of one tensor with different gradients."""
        whole, mine = self.theirs[self.name], self.mine[self.name]
        if whole.spread <= max(self.first.allowed * mine.norm, CLEAR * mine.norm):
            return None
        names = {copy.name for copy in whole.copies}
        stages = {self.both.stage_of([rank], self.name) for rank in whole.ranks}
        ranks = ", ".join(map(str, whole.ranks))
        if len(names) > 1 or (len(stages) > 1 and self.name in self.both.names.ties):
            both = " and ".join(sorted(names))
            return _tie(self.name, f"its copies {both} on ranks {ranks} have different gradients")
        total, best = self._of_copies(whole, mine)
        how = f", and their {total} is {as_times(best.factor)} the reference's" if best.error < CLEAR else ""
        alone = self._own_samples(whole)
        if not how and alone:
            how = f"; {alone}"
        group = self._group_of(whole)
        return Cause(
            "missing_reduction",
            f"the gradient of {self.name} differs between ranks {ranks}, which hold the same part{how}",
            f"the all-reduce of this gradient over {group}",
        )

    def _of_copies(self, whole: WholeTensor, mine: WholeTensor) -> tuple[str, Fit]:
        kinds: defaultdict[object, list[Array]] = defaultdict(list)
        for copy in whole.copies:
            kinds[copy.blocks].append(copy.sketch)
        total = np.sum([np.sum(each, axis=0) for each in kinds.values()], axis=0)
        found = fit(mine.sketch, total)
        many = max(len(each) for each in kinds.values())
        if abs(found.factor / many - 1) < NEAR:
            return "mean", Fit(found.factor / many, found.error)
        return "sum", found

    def _own_samples(self, whole: WholeTensor) -> str:
        """Whether a copy has the gradient of some samples alone."""
        rows = self.samples([self.name])
        if rows is None or whole.kinds > 1:
            return ""
        copy = whole.copies[0]
        weights = weights_of(rows, copy.sketch[:, None].reshape(-1))
        if weights is None:
            return ""
        kept = [index for index, weight in enumerate(weights) if abs(weight) > COUNTS]
        return f"rank {copy.rank} has the gradient of samples {listed(kept)} alone" if len(kept) < len(weights) else ""

    def _group_of(self, whole: WholeTensor) -> str:
        many = len(whole.copies) // max(1, whole.kinds)
        near = [name for name, size in self.both.candidate.sizes.items() if size == many]
        return f"the group of {many} ranks{f' ({near[0]})' if len(near) == 1 else ''}"

    def _recomputed(self) -> Cause | None:
        """A module that was computed again, from other inputs: a rank has some rows of its outputs only once."""
        outputs = self.both.outputs(self.both.candidate, self.step)
        many = {key: sum(len(event["rows"]) for _, event in events) for key, events in outputs.items()}
        block = self.name.rpartition(".")[0].rpartition(".")[0]
        for (module, place), events in outputs.items():
            if not module.startswith(block) or many[module, place] != 2 * min(many.values()):
                continue
            for rank in sorted({rank for rank, _ in events}):
                rows = np.concatenate([event["rows"][:, :8] for own, event in events if own == rank])
                apart = np.sqrt(np.mean(np.square(rows[:, None] - rows[None]), axis=2))
                np.fill_diagonal(apart, np.inf)
                alone = int(np.sum(apart.min(axis=1) > CLEAR * norm(rows)))
                if alone:
                    return Cause(
                        "order",
                        f"rank {rank} computed {module} twice for each microbatch, {alone} rows of it only once",
                        "the inputs that are kept for recomputation, and the group over which they are gathered",
                    )
        return None

    def _stale(self) -> Cause | None:
        """The gradient of the step before, alone or added."""
        if not self.step:
            return None
        for run, names, whose in (
            (self.both.reference, None, "reference"),
            (self.both.candidate, self.both.names, "candidate"),
        ):
            before = wholes(run, self.step - 1, self.kind, names)
            if self.name not in before:
                continue
            old, now, new = before[self.name].sketch, self.mine[self.name].sketch, self.theirs[self.name].sketch
            same, more = norm(new - old) < CLEAR * norm(new), fit(old, new - now)
            if same or (more.error < CLEAR and norm(new - now) > CLEAR * norm(new)):
                how = "is" if same else f"has, besides its own, {as_times(more.factor)}"
                return Cause(
                    "stale",
                    f"the gradient of {self.name} {how} that of step {self.step - 1} in the {whose}",
                    "zero_grad, and buffers that keep gradients between steps",
                )
        return None

    def _factor(self, same: bool = False) -> Cause | None:
        """A factor for each gradient that is wrong; if `same`, one for all of them."""
        fits = {each.parameter: self._fit(each.parameter) for each in self.wrong if each.parameter in self.theirs}
        first = fits[self.name]
        clear = max(CLEAR, min(0.1, self.first.allowed))
        shares = [each.factor for each in fits.values() if each.error < 2 * clear]
        alike = len(shares) == len(fits) and spread_of(shares) < max(NEAR, clear)
        if first.error > clear or (same and not alike) or abs(first.factor - 1.0) < 2 * first.error:
            return None
        count, verb = f"{len(fits)} of {len(self.mine)} gradients", "are"
        if len(fits) == 1:
            count, verb = f"the gradient of {self.name}", "is"
        elif alike and len(fits) == len(self.mine):
            count = "all gradients"
        size = named(first.factor, self.sizes)
        if alike and (unclipped := self._of_one_clipping(first.factor)) is not None:
            return unclipped
        if alike and self._is_clipped():
            root = root_named(first.factor, self.sizes)
            return _norm(
                f"all gradients are {as_times(first.factor)} the reference's{f', {root}' if root else ''}", first.factor
            )
        if abs(first.factor) < NO_FACTOR:
            return Cause("unknown", f"{count} {verb} zero", "whether the loss reaches this module")
        why = f", {size}" if size else ""
        where = "" if alike else f" ({self.name} first; factors differ)"
        return _scale(f"{count} {verb} {as_times(first.factor)} the reference's{why}{where}", first.factor)

    def _of_one_clipping(self, factor: float) -> Cause | None:
        """A scale of gradients before clipping, which the reference alone needs: it has the size of something."""
        for _, event in self.both.reference.events(self.step, "norm"):
            value, most = event["value"], float(event["most"])
            before = factor * most / value
            if value > most and self.kind == "gradient" and factor < 1 and (size := named(before, self.sizes)):
                return _scale(
                    f"all gradients are {as_times(before)} the reference's before its clipping, {size}", before
                )
        return None

    def _clipped(self) -> Cause | None:
        """Nearly a multiple for all gradients, and a run that clips: parts of the gradients have other factors."""
        fits = [self._fit(each.parameter) for each in self.wrong if each.parameter in self.theirs]
        if not self._is_clipped() or len(fits) < len(self.mine) or any(each.error > PARTLY for each in fits):
            return None
        low, high = min(each.factor for each in fits), max(each.factor for each in fits)
        return _norm(f"all gradients are multiples of the reference's, or their parts are: by {low:.3g} to {high:.3g}")

    def _fit(self, name: str) -> Fit:
        return fit(self.mine[name].sketch, self.theirs[name].sketch)

    def _differs(self, kind: str) -> bool:
        """Whether the first gradient differs, as it was before or after clipping."""
        mine, theirs = self.both.mine(self.step, kind), self.both.theirs(self.step, kind)
        if self.first.parameter not in mine or self.first.parameter not in theirs:
            return False
        one, other = mine[self.first.parameter], theirs[self.first.parameter]
        return max(norm(one.sketch - other.sketch), other.spread) > self.first.allowed * one.norm

    def _is_clipped(self) -> bool:
        """Whether a run clipped the gradients, which differ only then."""
        return self.kind == "gradient" and any(
            event["value"] > event["most"]
            for run in (self.both.reference, self.both.candidate)
            for _, event in run.events(self.step, "norm")
        )

    def samples(self, names: Sequence[str]) -> Array | None:
        """What each sample of the reference adds to these gradients, [numbers, samples]; None if it was not recorded,
        or does not add up to them.
        """
        first = self.both.names.first
        found: list[Array] = []
        for name in names:
            by_batch: dict[int, Array] = {}
            for _, event in self.both.reference.events(self.step, "samples"):
                if first.get(event["name"]) == name:
                    known = by_batch.get(event["microbatch"])
                    fits = known is None or known.shape == event["rows"].shape
                    if not fits:
                        return None
                    by_batch[event["microbatch"]] = event["rows"] if known is None else known + event["rows"]
            if not by_batch:
                continue
            rows = np.concatenate([by_batch[index] for index in sorted(by_batch)])
            whole = fit(rows.sum(axis=0), self.mine[name].sketch)
            if whole.error < CLEAR:
                found.append(rows * whole.factor)
        if not found or len({each.shape for each in found}) > 1:
            return None
        return np.concatenate([rows.T for rows in found])

    def _samples(self) -> Cause | None:
        """Samples that count too much or too little."""
        names = [each.parameter for each in self.wrong if each.parameter in self.theirs]
        usable = [name for name in names if self.samples([name]) is not None]
        rows = self.samples(usable)
        if rows is None:
            return None
        weights = weights_of(rows, np.concatenate([self.theirs[name].sketch for name in usable]))
        return None if weights is None else cause_of(weights, self.name)

    def _places(self) -> Cause | None:
        mine, theirs = self.mine[self.name], self.theirs[self.name]
        if self.first.error < LESS_PRECISE or abs(theirs.square / max(mine.square, TINY) - 1.0) > SAME_VALUES:
            return None
        return Cause(
            "sharding",
            f"the gradient of {self.name} has the reference's values, but at other places",
            "how parts are cut from the whole and put together, and which rank has which",
        )

    def _precision(self) -> Cause | None:
        mine, theirs = self.mine[self.name], self.theirs[self.name]
        coarse = max(unit(copy.dtype) for copy in theirs.copies)
        if coarse > max(unit(copy.dtype) for copy in mine.copies):
            dtypes = {copy.dtype.removeprefix("torch.") for copy in theirs.copies}
            return precision(
                f"the gradient of {self.name} is kept in {', '.join(dtypes)}, and {self.first.error:.1%} off"
            )
        if self.first.error < LESS_PRECISE and self.of_loss < LOSS_LESS_PRECISE:
            return precision(
                f"the gradient of {self.name} is {self.first.error:.2%} off, as if a dtype of fewer bits was used"
            )
        return None

    def _tie_alone(self) -> Cause | None:
        ties = self.both.names.ties
        if self.name in ties:
            return _tie(
                self.name,
                f"it is used as {' and '.join(ties[self.name])}, and its gradient is {self.first.error:.0%} off",
            )
        return None


def _tie(name: str, evidence: str) -> Cause:
    return Cause(
        "missing_tie",
        f"{name} is one weight with several uses, and {evidence}",
        "the sum of the gradients of its copies",
    )


def _norm(evidence: str, factor: float | None = None) -> Cause:
    look = "which parameters and ranks the norm for clipping sums over, and which it counts twice"
    return Cause("norm", evidence, look, None if factor is None else round(factor, 6))


def _scale(evidence: str, factor: float) -> Cause:
    look = "what the loss and its gradients are divided or multiplied by, and whether a sum is a mean"
    return Cause("scale", evidence, look, round(factor, 6))


def precision(evidence: str) -> Cause:
    """The cause of an error that a coarser dtype explains."""
    return Cause("precision", evidence, "casts, autocast, and the dtype in which sums are kept")


def norms(both: TwoRuns, first: Difference) -> Cause:
    """The cause of a wrong norm, of gradients that are right."""
    values = [event["value"] for _, event in both.reference.events(first.step, "norm")]
    others = {rank: event["value"] for rank, event in both.candidate.events(first.step, "norm")}
    factor = others[first.ranks[0]] / values[0]
    why = root_named(factor, both.counts(first.step))
    apart = " and differs between ranks" if spread_of([*others.values()]) > DISAGREES else ""
    how = f"{as_times(factor)} the reference's{f', {why}' if why else ''}{apart}"
    return _norm(f"the gradients are right, and their norm is {how}", factor)
