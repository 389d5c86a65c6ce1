"""Causes of wrong gradients: what the candidate's gradients are in terms of the reference's, of its samples, of the
step before, and of each other.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import cached_property
from math import sqrt

import numpy as np

from pipeflow.checking import limits
from pipeflow.checking.differences import nearest
from pipeflow.checking.files import INSIDE, Array
from pipeflow.checking.findings import Cause, Difference, Evidence, explains
from pipeflow.checking.fits import DTYPES, Fit, as_times, fit, listed, named, root_named, spread_of
from pipeflow.checking.runs import RecordedRun, WholeTensor, norm, owner
from pipeflow.checking.two_runs import TwoRuns

NORM = "which parameters and ranks the norm for clipping sums over, and which it counts twice"
EARLY = "the order of the all-reduce and of clipping: a norm is that of gradients that are added up"
HARDLY = "all outputs that were compared are right, the loss is hardly another"
FORMULA = "the formula of the loss: smoothing of labels, weights of classes, terms that are added"
SCALE = "what the loss and its gradients are divided or multiplied by, and whether a sum is a mean"
TIE = "the sum of the gradients of its copies"
MEANS = "whether the mean over tokens is that of the whole batch, or one of each microbatch, replica or sequence"


def weights_of(rows: Array, values: Array) -> list[float] | None:
    """How often each sample counts in a gradient: w with rows w = values. Neighbours are taken together if there are
    more samples than numbers. None if no w explains the gradient.
    """
    many = rows.shape[1]
    for group in (size for size in (1, 2, 4, 8, 16, 32, 64, 128) if many % size == 0):
        added = rows.reshape(len(rows), many // group, group).sum(axis=2)
        if added.shape[1] * 1.3 > len(rows) and added.shape[1] > 1:
            continue
        found, *_ = np.linalg.lstsq(added, values, rcond=1e-6)
        left = norm(values - added @ found)
        if left < limits.CLEAR * norm(values) and left <= limits.EXPLAINED * norm(values - rows.sum(axis=1)):
            return [float(weight) for weight in np.repeat(found, group)]
    return None


def _clipped_to(run: RecordedRun) -> float | None:
    """The norm that all gradients of a run have in each of several steps, if it is a round number."""
    norms = [sqrt(sum(each.square for each in run.tensors(step, "gradient").values())) for step in range(run.num_steps)]
    most = float(f"{norms[0]:.2g}")
    return most if len(norms) > 1 and all(abs(each - most) < limits.CLIPPED * most for each in norms) else None


class Gradients:
    """The gradients of a step in both runs.

    Args:
        both: the runs.
        found: all differences of the step; the first of a gradient is explained.
    """

    def __init__(self, both: TwoRuns, found: Sequence[Difference]) -> None:
        self.both, self.wrong = both, [each for each in found if each.what == "gradient"]
        self.first = self.wrong[0]
        self.name, self.step, self.sizes = self.first.parameter, self.first.step, both.counts(self.first.step)
        self.differs_in_loss = any(each.what in ("loss", "scalar") for each in found)
        self.kind = "unclipped" if self._differs("unclipped") else "gradient"
        self.mine, self.theirs = (run.tensors(self.step, self.kind) for run in both.runs)
        self.names = [each.parameter for each in self.wrong if each.parameter in self.theirs]

    def _differs(self, kind: str) -> bool:
        """Whether the first gradient differs, as it was before or after clipping."""
        one, other = (run.tensors(self.step, kind).get(self.name) for run in self.both.runs)
        return one is not None and other is not None and one.apart(other) > self.first.allowed * one.norm

    @cached_property
    def fits(self) -> dict[str, Fit]:
        """For each wrong gradient, how it is a multiple of the reference's."""
        return {name: fit(self.mine[name].sketch, self.theirs[name].sketch) for name in self.names}

    @property
    def group(self) -> str:
        """The ranks that have copies of the gradient."""
        whole = self.theirs[self.name]
        many = len(whole.copies) // max(1, whole.kinds)
        near = [name for name, size in self.both.candidate.sizes.items() if size == many]
        return f"the group of {many} ranks{f' ({near[0]})' if len(near) == 1 else ''}"

    @cached_property
    def is_clipped(self) -> bool:
        """Whether a run clipped the gradients, which differ only then."""
        return self.kind == "gradient" and (
            any(event["value"] > event["most"] for run in self.both.runs for _, event in run.events(self.step, "norm"))
            or any(self.clipped_by_hand)
        )

    @cached_property
    def clipped_by_hand(self) -> tuple[float | None, float | None]:
        """The norm that all gradients of a run have in each of several steps, if it is a round number; of both runs."""
        return _clipped_to(self.both.reference), _clipped_to(self.both.candidate)

    @property
    def _to_which_norms(self) -> str:
        """To which norm each run clips by hand, in words."""
        found = zip(("reference", "candidate"), self.clipped_by_hand, strict=True)
        told = [f"{most:g} in each step of the {whose}" for whose, most in found if most is not None]
        return f"; their norm is {' and '.join(told)}" if told else ""

    def samples(self, names: Sequence[str]) -> Array | None:
        """What each sample of the reference adds to these gradients, [numbers, samples]; None if it was not recorded,
        or does not add up to them.
        """
        first = self.both.reference.first
        found: list[Array] = []
        for name in names:
            by_batch: dict[int, Array] = {}
            for _, event in self.both.reference.events(self.step, "samples"):
                if first.get(event["name"]) == name:
                    known = by_batch.get(event["microbatch"])
                    if known is not None and known.shape != event["rows"].shape:
                        return None
                    by_batch[event["microbatch"]] = event["rows"] if known is None else known + event["rows"]
            if not by_batch:
                continue
            rows = np.concatenate([by_batch[index] for index in sorted(by_batch)])
            whole = fit(rows.sum(axis=0), self.mine[name].sketch)
            if whole.error < limits.CLEAR:
                found.append(rows * whole.factor)
        if not found or len({each.shape for each in found}) > 1:
            return None
        return np.concatenate([rows.T for rows in found])

    @explains("missing_tie", TIE)
    def _absent_tie(self) -> Evidence:
        if self.name in self.theirs or self.name not in self.both.reference.ties:
            return None
        return f"{self.name} is one weight with several uses, and the candidate has no gradient for it"

    @explains("detached", "whether this value shall have no gradient")
    def _detached(self) -> Evidence:
        """A module that detaches a value, as the reference does not: from within it on, all gradients are wrong."""
        mine, theirs = (
            {run.ranks[rank].module(each["module"]): each["where"] for rank, each in run.events(self.step, "detached")}
            for run in self.both.runs
        )
        order, types = self.both.rounding.order, self.both.reference.types
        places = {order.get(owner(name), -1) for name in self.mine if types.get(owner(name), {}).get("leaf")}
        last = max(order.get(owner(each.parameter), -1) for each in self.wrong)
        for module in theirs.keys() - mine.keys():
            inside = [place for name, place in order.items() if f"{name}.".startswith(f"{module}.")] or [-1]
            first, end = min(inside), max(inside)
            if last <= end < max(places) and not any(last < place < first for place in places):
                return f"the code of {module} ({theirs[module]}) detaches a value, as the reference does not"
        return None

    @explains("unknown", "whether the loss reaches this module")
    def _absent(self) -> Evidence:
        return None if self.name in self.theirs else f"{self.name} has no gradient in the candidate"

    @explains("norm", EARLY)
    def _clipped_early(self) -> Evidence:
        """Gradients that differ between ranks when they are clipped, and are equal when the optimizer steps."""
        whole, after = self.theirs[self.name], self.both.candidate.tensors(self.step, "gradient").get(self.name)
        if self.kind != "unclipped" or after is None or after.spread > limits.SKETCH * after.norm:
            return None
        if whole.spread <= max(self.first.allowed, limits.CLEAR) * self.mine[self.name].norm:
            return None
        ranks = ", ".join(map(str, whole.ranks))
        return f"ranks {ranks} clip gradients of {self.name} that differ between them, and are equal after it"

    @explains("missing_reduction", "the all-reduce of this gradient over {self.group}")
    def _copies(self) -> Evidence:
        """Copies of one tensor with different gradients."""
        whole, mine = self.theirs[self.name], self.mine[self.name]
        if whole.spread <= max(self.first.allowed, limits.CLEAR) * mine.norm:
            return None
        names = {copy.name for copy in whole.copies}
        stages = {self.both.stage_of([rank], self.name) for rank in whole.ranks}
        ranks = ", ".join(map(str, whole.ranks))
        if len(names) > 1 or (len(stages) > 1 and self.name in self.both.reference.ties):
            copies = f"its copies {' and '.join(sorted(names))} on ranks {ranks} have different gradients"
            return Cause("missing_tie", f"{self.name} is one weight with several uses, and {copies}", TIE)
        total, best = self._of_copies(whole, mine)
        how = f", and their {total} is {as_times(best.factor)} the reference's" if best.error < limits.CLEAR else ""
        return (
            f"the gradient of {self.name} differs between ranks {ranks}, which hold the same part"
            f"{how or self._own_samples(whole)}"
        )

    def _of_copies(self, whole: WholeTensor, mine: WholeTensor) -> tuple[str, Fit]:
        kinds: defaultdict[object, list[Array]] = defaultdict(list)
        for copy in whole.copies:
            kinds[copy.blocks].append(copy.sketch)
        total = np.sum([np.sum(each, axis=0) for each in kinds.values()], axis=0)
        found = fit(mine.sketch, total)
        many = max(len(each) for each in kinds.values())
        if abs(found.factor / many - 1) < limits.NEAR:
            return "mean", Fit(found.factor / many, found.error)
        return "sum", found

    def _own_samples(self, whole: WholeTensor) -> str:
        """Whether a copy has the gradient of some samples alone."""
        rows = self.samples([self.name])
        if rows is None or whole.kinds > 1:
            return ""
        copy = whole.copies[0]
        weights = weights_of(rows, copy.sketch)
        kept = [index for index, weight in enumerate(weights or ()) if abs(weight) > limits.COUNTS]
        if weights is None or len(kept) == len(weights):
            return ""
        return f"; rank {copy.rank} has the gradient of samples {listed(kept)} alone"

    @explains("stale", "zero_grad, and buffers that keep gradients between steps")
    def _earlier(self) -> Evidence:
        """The gradient of the step before, alone or added."""
        for run, whose in zip(self.both.runs, ("reference", "candidate"), strict=True) if self.step else ():
            before = run.tensors(self.step - 1, self.kind)
            if self.name not in before:
                continue
            old, now, new = before[self.name].sketch, self.mine[self.name].sketch, self.theirs[self.name].sketch
            same, more = norm(new - old) < limits.CLEAR * norm(new), fit(old, new - now)
            if same or (more.error < limits.CLEAR and norm(new - now) > limits.CLEAR * norm(new)):
                how = "is" if same else f"has, besides its own, {as_times(more.factor)}"
                return f"the gradient of {self.name} {how} that of step {self.step - 1} in the {whose}"
        return None

    @explains("scale", SCALE)
    def _one_factor(self) -> Evidence:
        return self._as_factor(same=True)

    @explains("scale", "what each rank multiplies its part of the gradients by")
    def _factor_of_each_rank(self) -> Evidence:
        """Parts of gradients that are multiples of the reference's, by one factor for all parts of a rank."""
        ranks = sorted({copy.rank for name in self.names for copy in self.theirs[name].copies})
        wanted = np.concatenate([self.mine[name].sketch for name in self.names])
        parts = np.zeros((len(wanted), len(ranks)))
        for index, name in enumerate(self.names):
            for copy in self.theirs[name].copies:
                parts[8 * index : 8 * index + 8, ranks.index(copy.rank)] += copy.sketch
        many = {(self.theirs[name].kinds, len(self.theirs[name].copies)) for name in self.names}
        if any(kinds < 2 or kinds != copies for kinds, copies in many) or len(wanted) < 2 * len(ranks):
            return None
        found, *_ = np.linalg.lstsq(parts, wanted, rcond=1e-6)
        left = norm(wanted - parts @ found)
        is_clear = left < limits.CLEAR * norm(wanted) and left < limits.EXPLAINED * norm(wanted - parts.sum(axis=1))
        if not is_clear or min(found) <= 0 or spread_of([*found]) < limits.NEAR:
            return None
        factors = ", ".join(f"{1.0 / share:.3g}" for share in found)
        what = f"the parts of ranks {', '.join(map(str, ranks))} are {factors} times the reference's"
        return Cause("norm", what, NORM) if self.is_clipped else what

    @explains("missing_microbatch", "which microbatches the schedule runs, and where gradients are added up")
    def _samples(self) -> Evidence:
        """Samples that count too much or too little."""
        usable = [name for name in self.names if self.samples([name]) is not None]
        rows = self.samples(usable)
        if rows is None:
            return None
        weights = weights_of(rows, np.concatenate([self.theirs[name].sketch for name in usable]))
        if weights is None:
            return None
        base = float(np.median([weight for weight in weights if weight > limits.COUNTS] or [1.0]))
        shares = [weight / base for weight in weights]
        none, ones, twice = (
            [index for index, share in enumerate(shares) if abs(share - count) < limits.WHOLE_COUNT]
            for count in (0, 1, 2)
        )
        if none and len(none) + len(ones) == len(shares):
            return f"samples {listed(none)} add nothing to the gradients, from {self.name} on"
        if twice and len(twice) + len(ones) == len(shares):
            return f"samples {listed(twice)} count twice in the gradients, from {self.name} on", 2.0
        low, high = min(shares), max(shares)
        if high - low < limits.UNEVEN or low < -limits.WHOLE_COUNT:
            return None
        if (powers := self._powers(weights)) is not None:
            return powers
        counts = f"{low * base:.3g} to {high * base:.3g} times as in the reference"
        if self._loss_has_another_factor(float(np.mean(weights))):
            return Cause("formula", f"{HARDLY}, and samples count {counts}: the loss has another formula", FORMULA)
        most, others = self.clipped_by_hand
        if most is not None and others is None:
            return Cause("norm", f"samples count differently in the gradients: {counts}{self._to_which_norms}", EARLY)
        return Cause("masked_tokens", f"samples count differently in the gradients: {counts}", MEANS)

    def _powers(self, weights: Sequence[float]) -> Cause | None:
        """Samples that count by powers of one factor: what was added up already is divided with each later part."""
        levels: list[float] = []
        for weight in sorted(weights, reverse=True):
            if not levels or weight < levels[-1] * (1.0 - limits.WHOLE_COUNT):
                levels.append(weight)
        if len(levels) < 3:
            return None
        factor = levels[1] / levels[0]
        errors = (abs(level / (levels[0] * factor**power) - 1.0) for power, level in enumerate(levels))
        if max(errors) > limits.NEAR:
            return None
        counts = f"{', '.join(f'{level:.3g}' for level in levels)} times as in the reference, powers of {factor:.3g}"
        look = "what multiplies gradients again after each part of an accumulation, with those of the parts before"
        return Cause("scale", f"samples count {counts}", look, round(factor, 6))

    @explains("norm", NORM)
    def _clipped(self) -> Evidence:
        """Nearly a multiple for all gradients, and a run that clips: parts of the gradients have other factors."""
        fits = self.fits.values()
        if not self.is_clipped or len(fits) < len(self.mine) or any(each.error > limits.PARTLY for each in fits):
            return None
        low, high = min(each.factor for each in fits), max(each.factor for each in fits)
        how = f"by {low:.3g} to {high:.3g}{self._to_which_norms}"
        return f"all gradients are multiples of the reference's, or their parts are: {how}"

    @explains("scale", SCALE)
    def _factors(self) -> Evidence:
        return self._as_factor(same=False)

    def _as_factor(self, *, same: bool) -> Evidence:
        """A factor for each gradient that is wrong; if `same`, one for all of them."""
        fits, first = self.fits, self.fits[self.name]
        clear = max(limits.CLEAR, min(0.1, self.first.allowed))
        shares = [each.factor for each in fits.values() if each.error < 2 * clear]
        alike = len(shares) == len(fits) and spread_of(shares) < max(limits.NEAR, clear)
        if first.error > clear or (same and not alike) or abs(first.factor - 1.0) < 2 * first.error:
            return None
        count, verb = f"{len(fits)} of {len(self.mine)} gradients", "are"
        if len(fits) == 1:
            count, verb = f"the gradient of {self.name}", "is"
        elif alike and len(fits) == len(self.mine):
            count = "all gradients"
        if alike and (unclipped := self._of_one_clipping(first.factor)) is not None:
            return unclipped
        times = as_times(first.factor)
        if alike and self.is_clipped:
            root = root_named(first.factor, self.sizes)
            how = f"{times} the reference's{f', {root}' if root else ''}"
            look = f"{NORM}; whether both runs clip, and to which norm" if any(self.clipped_by_hand) else NORM
            return Cause("norm", f"all gradients are {how}{self._to_which_norms}", look, round(first.factor, 6))
        if abs(first.factor) < limits.NO_FACTOR:
            return Cause("unknown", f"{count} {verb} zero", "whether the loss reaches this module")
        if alike and self._loss_has_another_factor(first.factor):
            what = f"{HARDLY}, and {count} {verb} {times} the reference's: the loss has another formula"
            return Cause("formula", what, FORMULA)
        size = named(first.factor, self.sizes)
        where = "" if alike else f" ({self.name} first; factors differ)"
        return f"{count} {verb} {times} the reference's{f', {size}' if size else ''}{where}", first.factor

    def _loss_has_another_factor(self, factor: float) -> bool:
        """Whether the loss is wrong, too, and by much less than the gradients: it is not scaled then."""
        mine, theirs = (run.losses(self.step) for run in self.both.runs)
        return self.differs_in_loss and bool(mine and theirs) and nearest(mine, theirs) < limits.APART * abs(factor - 1)

    def _of_one_clipping(self, factor: float) -> Evidence:
        """A scale of gradients before clipping, which the reference alone needs: it has the size of something."""
        for _, event in self.both.reference.events(self.step, "norm"):
            value, most = event["value"], float(event["most"])
            before = factor * most / value
            if value > most and self.kind == "gradient" and factor < 1 and (size := named(before, self.sizes)):
                return f"all gradients are {as_times(before)} the reference's before its clipping, {size}", before
        return None

    @explains("sharding", "how parts are cut from the whole and put together, and which rank has which")
    def _elsewhere(self) -> Evidence:
        if self.first.error < limits.LESS_PRECISE or not self.theirs[self.name].is_as_large(self.mine[self.name]):
            return None
        return f"the gradient of {self.name} has the reference's values, but at other places"

    @explains("order", "the inputs that are kept for recomputation, and the group over which they are gathered")
    def _recomputed(self) -> Evidence:
        """A module that was computed again, from other inputs: a rank has some rows of its outputs only once."""
        block = owner(owner(self.name))
        for (module, _), events in self.both.candidate.outputs(self.step).items():
            if not module.startswith(block) or INSIDE in module:
                continue
            for rank in sorted({rank for rank, _ in events}):
                mine = [event for own, event in events if own == rank]
                again = [event["rows"][:, :8] for event in mine if event.get("again")]
                first = [event["rows"][:, :8] for event in mine if not event.get("again")]
                if not first or sum(map(len, first)) != sum(map(len, again)):
                    continue
                rows, others = np.concatenate(first), np.concatenate(again)
                apart = np.sqrt(np.mean(np.square(rows[:, None] - others[None]), axis=2))
                if alone := int(np.sum(apart.min(axis=1) > limits.CLEAR * norm(rows))):
                    return f"rank {rank} computes {module} again in the backward, {alone} of {len(rows)} rows otherwise"
        return None

    @explains("precision", DTYPES)
    def _coarse(self) -> Evidence:
        theirs = self.theirs[self.name]
        if theirs.unit > self.mine[self.name].unit:
            dtypes = ", ".join({copy.dtype.removeprefix("torch.") for copy in theirs.copies})
            return f"the gradient of {self.name} is kept in {dtypes}, and {self.first.error:.1%} off"
        if self.first.error < limits.LESS_PRECISE and not self.differs_in_loss:
            return f"the gradient of {self.name} is {self.first.error:.2%} off, as if a dtype of fewer bits was used"
        return None

    @explains("missing_tie", TIE)
    def _tie(self) -> Evidence:
        uses = self.both.reference.ties.get(self.name, ())
        how = f"it is used as {' and '.join(uses)}, and its gradient is {self.first.error:.0%} off"
        return f"{self.name} is one weight with several uses, and {how}" if uses else None
