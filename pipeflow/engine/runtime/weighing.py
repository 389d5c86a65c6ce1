"""Weighing: what each microbatch's loss is multiplied by, so that the losses of all microbatches add up to that of the
batch. It follows from what the loss is divided by, or from `weigh`. Must not contain: how an operator is read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache, partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from pipeflow.core.errors import UsageError
from pipeflow.engine.parallel.context import Context
from pipeflow.engine.parallel.transport.agreement import all_gather, told_alike
from pipeflow.engine.runtime.loss_check import is_contradicted
from pipeflow.engine.runtime.loss_parts import (
    Lazy,
    LossPart,
    axis_of,
    joined,
    key_of,
    leaves_of,
    on_host,
    resized,
    settings_of,
    shapes_of,
    stand_in,
)
from pipeflow.engine.runtime.microbatch import Batch
from pipeflow.engine.runtime.program.results import Results, Weights, WholeLoss
from pipeflow.engine.runtime.stage import Stage
from pipeflow.engine.stages.criterion import CRITERION, own_loss, recorded
from pipeflow.engine.stages.divisors import LossTerms, Other, alike, form_of, ratios
from pipeflow.engine.stages.scaling import Scalars, Scaling, places
from pipeflow.engine.stages.stage import ModuleStage
from pipeflow.engine.stages.tape import Leaves, Recorded
from pipeflow.engine.stages.terms import Reading
from pipeflow.engine.stages.values import AmbiguousError, UnprovedError
from pipeflow.engine.torch_private.trees import tree_leaves, tree_map, tree_unflatten

TRIED, READ = 2, 8  # batches with which forms are tried, and microbatches of each that are read
FORMS = 256  # which are kept for other shapes and settings
UNKNOWN = (
    "it is not known what {loss} is divided by, so the losses of microbatches cannot be added up to that of the batch: "
    "{why}. Pass weigh=, a function of the labels that returns what the loss of a microbatch is divided by, such as "
    "weigh=lambda labels: (labels != -100).sum() for a mean over the labels that count, or weigh=len for a mean over "
    'samples; or pass a criterion and loss_over="batch", which computes the loss of the whole batch at once'
)


def weights_of_replicas(context: Context, counted: float, weight: float = 0.0, following: int = 0) -> list[float]:
    """The weights of the batches of all replicas, and of all parts that their ranks have of them.

    Args:
        context: the context of this rank.
        counted: a digest of what the weight counts, or the numbers that follow.
        weight: of this rank's batch.
        following: how many numbers the replicas exchange next.

    Raises UsageError on all replicas if they count different things: their weights could not be compared, and they
    would exchange rows of different lengths.
    """
    rows = all_gather(context.losses, [counted, float(following), weight])
    with told_alike(context.losses):
        if any(row[:2] != rows[0][:2] for row in rows):
            raise UsageError(UNKNOWN.format(loss="the loss", why="it is computed in other ways on other replicas"))
    return [each for *_, each in rows]


def weights_by(batch: Batch, labels: Sequence[object], weigh: Callable[..., float]) -> Weights:
    """The weights of microbatches by `weigh(labels)`. If the total is zero, they are all zero.

    Raises UsageError for a weight that is negative or not finite.
    """
    if all(each is None for each in labels):
        labels = batch.split(batch.inputs)
    return fractions_of([_weight(weigh, part) for part in labels])


def _weight(weigh: Callable[..., float], labels: object) -> float:
    try:
        return float(weigh(labels))
    except Exception as error:
        given = f"the entries {list(labels)}, since none is called labels" if isinstance(labels, dict) else "the labels"
        raise UsageError(f"weigh gets {given}, of a microbatch, and raised {type(error).__name__}: {error}") from error


def fractions_of(weights: list[float]) -> Weights:
    """These weights as fractions of their total. Raises UsageError for one that is negative or not finite."""
    for microbatch, weight in enumerate(weights):
        if not 0 <= weight < float("inf"):
            raise UsageError(f"weigh(labels) returned {weight} for microbatch {microbatch}: a weight must be 0 or more")
    total = sum(weights)
    return Weights([weight / total if total else 0.0 for weight in weights], total)


def share_of(results: Results, context: Context) -> float:
    """The factor that makes the average over the replicas an average over samples: this rank's weight in the whole
    batch, as a multiple of an equal share. Ranks of a grid with other samples add up their gradients, and share one.
    The ranks that have the last stage exchange their weights, on the host.

    Raises UsageError if nothing in the batch counts, or if the weights of the replicas count different things.
    """
    own = results.weights
    if not own.parts:
        return 1.0
    weights = [own.whole] if context.losses.size == 1 else weights_of_replicas(context, own.counted, own.whole)
    require_some(weights)
    return own.whole * context.copies.size / sum(weights)


def require_some(weights: Sequence[float]) -> None:
    """Raises UsageError if the weights of all replicas sum to zero."""
    if not sum(weights):
        raise UsageError("the weights of all microbatches sum to zero: no label of this batch counts")


class Divisors:
    """What a loss is divided by, read from its operators.

    Args:
        criterion: computes the loss from an output and labels.
        stage: the last stage, if it is one of a module that was cut; None for another.
        context: the context of this rank.
        scalar: with the module's own loss, the index of a leaf of its output to take in place of the loss.
    """

    def __init__(
        self, criterion: Callable[..., Tensor], stage: ModuleStage | None, context: Context, scalar: int | None = None
    ) -> None:
        self._criterion, self._stage, self._context, self._scalar = criterion, stage, context, scalar
        # with the trace, which keeps its id, and the number of samples in the batch
        self._forms: dict[Any, tuple[LossTerms | UnprovedError, object, int]] = {}
        self._tries = 0  # batches with which the forms were tried

    def weights(
        self,
        batch: Batch,
        entries: Sequence[dict[str, Any]],
        labels: Sequence[object],
        outputs: Sequence[object] | None = None,
    ) -> Weights | None:
        """The weights of a batch; None if they follow from the outputs of the last stage, which are not given.

        Raises UsageError if it is not known what the loss is divided by, and there are several microbatches.
        """
        replicas = self._context.losses.size // batch.repeats
        if batch.own:
            return fractions_of([float(size) for size in batch.sizes])
        if self._stage is None and outputs is None:
            return None
        outputs = [None] * len(labels) if outputs is None else outputs
        parts = self._parts(batch, entries, labels)
        try:
            found = self.weights_of(parts, outputs, self._unmoved(batch), replicas)
            if self._tries < TRIED and len(batch.sizes) * replicas > 1:
                self._tries += 1
                self._confirm(parts, outputs)
            return found
        except UnprovedError as error:
            if len(batch.sizes) == replicas == 1:
                return fractions_of([float(batch.sizes[0])])
            if isinstance(error.__cause__, UsageError):  # which says what to write
                raise error.__cause__ from None
            loss = "the module's own loss" if self._criterion is own_loss else "the criterion's loss"
            raise UsageError(UNKNOWN.format(loss=loss, why=error)) from error

    def weights_of(
        self,
        parts: Sequence[LossPart],
        outputs: Sequence[object],
        leaves: Sequence[Leaves],
        replicas: int,
    ) -> Weights:
        """The weights of these parts of a batch."""
        sizes = [part.samples for part in parts]
        try:
            found = self._weighed(self._forms_of(parts, outputs, leaves), leaves, sizes, replicas)
        except AmbiguousError:
            for index, (part, its) in enumerate(zip(parts, outputs, strict=True)):
                self._form(part, its, parts[index - 1])
            found = self._weighed(self._forms_of(parts, outputs, leaves), leaves, sizes, replicas)
        return found if isinstance(found, Weights) else self._scaled(parts[0], outputs[0], found, replicas)

    def _confirm(self, parts: Sequence[LossPart], outputs: Sequence[object]) -> None:
        """Raises UnprovedError if other microbatches, or outputs that are made up, contradict the form of the loss. The
        first batches try it.
        """
        form, *others = (
            self._read(part, its, None, parts) for part, its in zip(parts[:READ], outputs[:READ], strict=True)
        )
        if not any(form.seen) and form.is_clear and any(each.is_clear and each.kinds != form.kinds for each in others):
            raise UnprovedError("it is another one for some microbatches")
        if is_contradicted(self, parts, outputs):
            raise UnprovedError("with outputs made up for some samples, it is not what it was read to be")

    def multipliers(self, batch: Batch, entries: Sequence[dict[str, Any]]) -> list[float]:
        """What the number of each microbatch is multiplied by, to add up to that of the batch; its share of the samples
        if it is not known what the number is divided by.
        """
        shares = [size / sum(batch.sizes) for size in batch.sizes]
        try:
            parts = self._parts(batch, entries, [None] * len(entries))
            leaves = self._unmoved(batch)
            found = self._weighed(self._forms_of(parts, [None] * len(parts), leaves), leaves, batch.sizes, 1)
        except UnprovedError:
            return shares
        return found.parts if isinstance(found, Weights) else shares

    def form(self, batch: Batch, entries: Sequence[dict[str, Any]], labels: Sequence[object]) -> LossTerms:
        """The terms of the loss of the first microbatch. Raises UnprovedError if they are not known."""
        return self._form(self._parts(batch, entries, labels)[0])

    def _weighed(
        self, forms: Sequence[LossTerms], leaves: Sequence[Leaves], sizes: Sequence[int], replicas: int
    ) -> Weights | list[list[float]]:
        """The weights of microbatches whose leaves and forms are known, or those of their terms if they differ."""
        first = forms[0]
        if any(form is not first and form.kinds != first.kinds for form in forms):
            why = "it is another one for some microbatches"
            raise UnprovedError(why) if all(form.is_clear for form in forms) else AmbiguousError(why)
        counts = first.digest if replicas > 1 else 0.0
        if not first.totals and all(term.adds for term in first.terms):
            return Weights([float(replicas)] * len(sizes), 1.0, counted=counts)
        if not first.totals and not any(term.adds for term in first.terms):
            return fractions_of([float(size) for size in sizes])._replace(counted=counts)
        if all(form.is_simple for form in dict.fromkeys(forms)):
            counted = [form.divisor(each) for form, each in zip(forms, leaves, strict=True)]
            if not (whole := sum(counted)) and any(counted):
                raise UnprovedError("what it is divided by adds up to 0 over the microbatches")
            parts = [each / whole if each else 0.0 for each in counted]
            is_size = first.terms[0].factor.args[1].kind == "entries"
            return Weights(parts, float(sum(sizes)) if is_size else whole, counted=counts)
        summed = list if replicas == 1 else partial(self._summed, first)
        found = ratios(forms, leaves, summed, sizes)
        if all(alike(row) for row in found):
            return Weights([replicas * row[0] for row in found], 1.0)
        return found

    def _scaled(self, part: LossPart, output: object, ratios: list[list[float]], replicas: int) -> Weights:
        """The weights of microbatches whose terms have these."""

        def are_alike(terms: Sequence[int]) -> bool:
            return all(alike([row[term] for term in terms]) for row in ratios)

        scalars = Scalars()
        found = self.recorded(part, output, scalars)
        reading = Reading(partial(axis_of, part), part.samples, found.read)
        where, rest = places(reading, found.node, scalars.found, are_alike)
        return Weights([float(replicas)] * len(ratios), 1.0, Scaling(where, ratios, rest))

    def outputs(self, batch: Batch, labels: Sequence[object], output: object, microbatch: int) -> list[object]:
        """What the last stage is expected to return for each microbatch, if that for one is given."""
        parts = self._parts(batch, [{}] * len(labels), labels)
        sized = Lazy(lambda index: resized(output, parts[microbatch], parts[index]))
        first = {part.samples: index for index, part in reversed([*enumerate(parts)])}
        return [sized[index if part.pairs else first[part.samples]] for index, part in enumerate(parts)]

    def _summed(self, form: LossTerms, totals: Sequence[Tensor]) -> list[Tensor]:
        """The totals of all replicas, whose ranks with the last stage call it together. Raises UsageError on all of
        them if they count other things.
        """
        told = [float(each) for total in totals for each in total.flatten()]
        weights_of_replicas(self._context, form.digest, following=len(told))
        sums = iter([sum(column) for column in zip(*all_gather(self._context.losses, told), strict=True)])
        return [
            torch.tensor([next(sums) for _ in range(total.numel())], dtype=torch.float64, device="cpu").view(
                total.shape
            )
            for total in totals
        ]

    def _parts(self, batch: Batch, entries: Sequence[dict[str, Any]], labels: Sequence[object]) -> list[LossPart]:
        dims = batch.dims(batch.inputs) if self._stage else {}, batch.dims(batch.labels)
        order, divided, found = tuple(self._in_order(*dims)), batch.is_divided, []
        for each, label, size in zip(entries, labels, batch.sizes, strict=True):
            part = LossPart(each if self._stage else {}, label, dims, order, size, divided)
            if divided:
                own = tree_map(partial(_dim_of_pairs, size), (part.entries, label), dims)
                part = replace(part, dims=own, order=tuple(self._in_order(*own)))
            found.append(part)
        return found

    def _in_order(self, entries: Any, labels: object) -> list[Any]:
        """The leaves of a microbatch, or what stands in their places, in the order in which a trace numbers them."""
        return [*leaves_of(entries, self._stage), *tree_leaves(labels)]

    def _unmoved(self, batch: Batch) -> list[Leaves]:
        """The leaves of each microbatch where the caller has them, so that the host need not wait for a device."""

        @cache
        def leaves() -> list[list[Any]]:
            host = replace(batch, device=None, leaves=[])
            inputs: list[Any] = host.split(batch.inputs) if self._stage is not None else [{}] * len(batch.sizes)
            return list(map(self._in_order, inputs, host.split(batch.labels)))

        return on_host(leaves, len(batch.sizes), self._buffer)

    def on_host(self, parts: Sequence[LossPart]) -> list[Leaves]:
        """The leaves of these parts of a batch."""
        own = [self._in_order(part.entries, part.labels) for part in parts]
        return on_host(lambda: own, len(own), self._buffer)

    def _buffer(self, name: str) -> Tensor:
        """A buffer of the module, or one of the criterion, as it is now."""
        criterion = name.removeprefix(CRITERION)
        if criterion != name:
            return cast(nn.Module, self._criterion).get_buffer(criterion)
        assert self._stage is not None
        return self._stage.root.get_buffer(name)

    def _forms_of(
        self, parts: Sequence[LossPart], outputs: Sequence[object], leaves: Sequence[Leaves]
    ) -> list[LossTerms]:
        """The form of each microbatch: once for all of a size, but anew where Python reads other values."""
        whole = joined(leaves, parts[0].order)
        found: dict[int, LossTerms] = {}
        forms = []
        for index, part in enumerate(parts):
            key = index if part.pairs else part.samples
            if key not in found or not found[key].holds(leaves[index], whole):
                found[key] = self._form(part, outputs[index], parts=parts, leaves=(leaves[index], whole))
            forms.append(found[key])
        return forms

    def _form(
        self,
        part: LossPart,
        output: object = None,
        donor: LossPart | None = None,
        parts: Sequence[LossPart] = (),
        leaves: tuple[Leaves, Leaves] | None = None,
    ) -> LossTerms:
        """The terms of the loss of a microbatch. With a `donor` of samples, they are read anew if numbers in them are
        not clear; with the `leaves` of the microbatch and of the whole batch, if Python reads other values from them.
        """
        trace = None if self._stage is None else self._stage.planner.plan(part.entries, self._stage.root).trace
        key = key_of(part), tuple(shapes_of(output)), id(trace), settings_of(self._criterion)
        samples = sum(each.samples for each in parts)
        if not self._is_kept(key, samples, donor, leaves):
            if len(self._forms) > FORMS and key not in self._forms:
                self._forms.clear()
            try:
                self._forms[key] = self._read(part, output, donor, parts), trace, samples
            except UnprovedError as error:
                self._forms[key] = error, trace, samples
        found, *_ = self._forms[key]
        if isinstance(found, UnprovedError):
            raise found
        return found

    def _is_kept(self, key: Any, samples: int, donor: LossPart | None, leaves: tuple[Leaves, Leaves] | None) -> bool:
        """Returns True if the form with this key is that of a microbatch of a batch of so many samples, with these
        leaves and those of the whole batch.
        """
        if key not in self._forms:
            return False
        found, _, its = self._forms[key]
        if isinstance(found, UnprovedError):
            return donor is None and not found.depends
        if donor is not None and not found.is_clear:
            return False
        return not any(found.seen) or (leaves is not None and its == samples and found.holds(*leaves))

    def _read(self, part: LossPart, output: object, donor: LossPart | None, parts: Sequence[LossPart]) -> LossTerms:
        mine = self.recorded(part, output, None if donor is None else Scalars())

        @cache
        def other() -> Other | None:
            made = [partial(LossPart.whole, parts)] if (mine.seen or mine.read) and len(parts) > 1 else []
            is_whole = bool(mine.seen and made) and self._context.losses.size == 1
            more = dict.fromkeys((part.samples if part.pairs else 1, part.samples))  # halves stay halves
            made += [partial(part.larger, each, donor or part) for each in more]
            for index, make in enumerate(made):
                with suppress(UnprovedError, RuntimeError, ValueError):  # samples of other sizes cannot be put together
                    larger = make()
                    scalars = None if mine.seen else Scalars()  # plans of these sizes are kept
                    found = self.recorded(larger, resized(output, part, larger), scalars)
                    return Other(found, partial(axis_of, larger), larger.samples, is_whole and not index)
            return None

        try:
            return form_of(mine, partial(axis_of, part), part.samples, other)
        except UnprovedError as error:
            error.depends = bool(mine.seen)
            raise

    def recorded(self, part: LossPart, output: object, scalars: Scalars | None = None) -> Recorded:
        """How the loss of a microbatch is computed. With `scalars`, it is traced anew, and these are recorded."""
        device, count = self._context.device, len(leaves_of(part.entries, self._stage))
        if self._stage is None:
            return recorded(self._criterion, output, part.labels, count, {}, device, scalars)
        planner = self._stage.planner
        if scalars is None:
            trace = planner.plan(part.entries, self._stage.root).trace
        else:
            try:
                trace = planner.observed(part.entries, lambda flow, _: scalars.on(flow.tape))[0]
            except Exception as error:  # whatever the forward raises
                raise UnprovedError(str(error)) from error
            trace.seal(planner.sealed(trace))
        if self._criterion is own_loss:
            loss = trace.loss if self._scalar is None else trace.scalars[self._scalar]
            if loss is None:
                own_loss(tree_unflatten(trace.returned.leaves, trace.returned.spec), None)  # raises its own error
                raise UnprovedError("the module computes no loss")
            return loss
        leaves = [stand_in(leaf) for leaf in trace.returned.leaves]
        its = {index: each for index, each in enumerate(trace.scalars) if each is not None}
        returned = tree_unflatten(leaves, trace.returned.spec)
        return recorded(self._criterion, returned, part.labels, count, its, device, scalars)


def _dim_of_pairs(size: int, leaf: object, dim: int) -> int:
    """The dimension of the samples in a divided batch: 0 also of a tensor with an entry for each pair of rows."""
    return 0 if isinstance(leaf, Tensor) and leaf.dim() and 2 * len(leaf) == size else dim


class Weigher:
    """Finds the weights of the microbatches of each batch, for the last stage.

    Args:
        context: the context of this rank.
        over_batch: True if the loss is computed once, for the whole batch.
    """

    def __init__(self, context: Context, *, over_batch: bool) -> None:
        self._context, self._over_batch = context, over_batch
        self._divisors: tuple[object, Divisors] | None = None  # with the key of their criterion

    def load(
        self,
        results: Results,
        batch: Batch,
        criterion: Callable[..., Tensor],
        weigh: Callable[..., float] | None,
        last: Stage,
        *,
        training: bool,
    ) -> None:
        """Puts the weights into the results, now or as soon as the last stage has an output. In training, all replicas
        do so together. In evaluation they do so only for terms that are divided by different numbers.
        """
        if self._over_batch:
            labels = replace(batch, sizes=[sum(batch.sizes)], leaves=[]).split(batch.labels)[0]
            results.whole = WholeLoss(len(batch.sizes), labels)
            results.weights = Weights([1.0] * len(batch.sizes), float(sum(batch.sizes)))
            return
        if weigh is not None:
            results.weights = weights_by(batch, results.labels, weigh)
            return
        divisors = self._divisors_of(criterion, last)

        def settle(output: object, microbatch: int) -> None:
            outputs = divisors.outputs(batch, results.labels, output, microbatch)
            found = divisors.weights(batch, last.keywords, results.labels, outputs)
            assert found is not None
            results.weights = found
            results.settle = partial(_require_shapes, list(map(shapes_of, outputs)))
            if training:
                results.gradient_scale *= share_of(results, self._context)

        weights = divisors.weights(batch, last.keywords, results.labels)
        if weights is None:
            results.settle = settle
            return
        results.weights = weights
        if weights.scaling is not None:
            last.call = weights.scaling.watched(last.call)

    def _divisors_of(self, criterion: Callable[..., Tensor], last: Stage) -> Divisors:
        key = getattr(criterion, "key", criterion)
        if self._divisors is None or self._divisors[0] != key:
            stage = last.module if isinstance(last.module, ModuleStage) else None
            self._divisors = key, Divisors(criterion, stage, self._context)
        return self._divisors[1]


def _require_shapes(expected: Sequence[list[tuple[int, ...]]], output: object, microbatch: int) -> None:
    """Raises UsageError if an output has other shapes than the weights were found with."""
    if (found := shapes_of(output)) != expected[microbatch]:
        why = (
            f"microbatch {microbatch} has outputs of shapes {found}, but {expected[microbatch]} follow from another one"
        )
        raise UsageError(UNKNOWN.format(loss="the criterion's loss", why=why))
