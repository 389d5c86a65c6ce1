"""Divisors: what the loss of each microbatch of a batch is divided by, read from the operators of the loss. Must not
contain: how an operator is read, which is in `stages/divisors`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache, partial
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from pipeflow.core.errors import UsageError
from pipeflow.engine.parallel.context import Context
from pipeflow.engine.parallel.transport.agreement import all_gather
from pipeflow.engine.runtime.loss_parts import (
    Joined,
    LossPart,
    OnHost,
    axis_of,
    is_contradicted,
    key_of,
    leaves_of,
    resized,
    settings_of,
    shapes_of,
    stand_in,
)
from pipeflow.engine.runtime.microbatch import Batch
from pipeflow.engine.runtime.weights import UNKNOWN, Weights, fractions_of, weights_of_replicas
from pipeflow.engine.stages.divisors import LossTerms, Other, alike, form_of, ratios
from pipeflow.engine.stages.loss import CRITERION, own_loss, recorded
from pipeflow.engine.stages.scaling import Scalars, Scaling, places
from pipeflow.engine.stages.stage import ModuleStage
from pipeflow.engine.stages.tape import Leaves, Recorded
from pipeflow.engine.stages.terms import Reading
from pipeflow.engine.stages.values import AmbiguousError, UnprovedError
from pipeflow.engine.torch_private.trees import tree_leaves, tree_unflatten

T = TypeVar("T")
TRIED, READ = 2, 8  # batches with which forms are tried, and microbatches of each that are read
FORMS = 256  # which are kept for other shapes and settings


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
        # with the trace, which keeps its id, and the sizes of the batch's microbatches
        self._forms: dict[Any, tuple[LossTerms | UnprovedError, object, Sequence[int]]] = {}
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
        replicas = self._context.data.size
        if batch.own:
            return fractions_of([float(size) for size in batch.sizes])
        if self._stage is None and outputs is None:
            return None
        outputs = [None] * len(labels) if outputs is None else outputs
        parts = self._parts(batch, entries, labels)
        try:
            found = self.weights_of(parts, outputs, self._unmoved(batch), batch.sizes, replicas)
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
        sizes: Sequence[int],
        replicas: int,
    ) -> Weights:
        """The weights of these parts of a batch."""
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
        return _by_size(parts, lambda index: resized(output, parts[microbatch], parts[index]))

    def _summed(self, form: LossTerms, totals: Sequence[Tensor]) -> list[Tensor]:
        """The totals of all replicas, whose ranks with the last stage call it together. Raises UsageError on all of
        them if they count other things.
        """
        told = [float(each) for total in totals for each in total.flatten()]
        weights_of_replicas(self._context, form.digest, following=len(told))
        sums = iter([sum(column) for column in zip(*all_gather(self._context.replicas, told), strict=True)])
        return [
            torch.tensor([next(sums) for _ in range(total.numel())], dtype=torch.float64, device="cpu").view(
                total.shape
            )
            for total in totals
        ]

    def _parts(self, batch: Batch, entries: Sequence[dict[str, Any]], labels: Sequence[object]) -> list[LossPart]:
        dims = [*leaves_of(batch.dims(batch.inputs), self._stage), *tree_leaves(batch.dims(batch.labels))]
        divided, found = batch.is_divided, []
        for each, label, size in zip(entries, labels, batch.sizes, strict=True):
            part = LossPart(each if self._stage else {}, label, tuple(dims), size, divided)
            if divided:  # a tensor with an entry for each pair of rows
                leaves = part.leaves(self.leaves_of)
                halves = (isinstance(leaf, Tensor) and leaf.dim() and 2 * len(leaf) == size for leaf in leaves)
                part = replace(part, dims=tuple(0 if half else dim for half, dim in zip(halves, dims, strict=True)))
            found.append(part)
        return found

    def _unmoved(self, batch: Batch) -> list[OnHost]:
        """The leaves of each microbatch where the caller has them, so that the host need not wait for a device."""

        @cache
        def leaves() -> list[list[Any]]:
            host = replace(batch, device=None, leaves=[])
            inputs: list[Any] = host.split(batch.inputs) if self._stage is not None else [{}] * len(batch.sizes)
            labels = host.split(batch.labels)
            return [
                [*leaves_of(each, self._stage), *tree_leaves(its)] for each, its in zip(inputs, labels, strict=True)
            ]

        copies: dict[int, Sequence[Any]] = {}
        return [OnHost(microbatch, leaves, self.buffer, copies) for microbatch in range(len(batch.sizes))]

    def buffer(self, name: str) -> Tensor:
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
        joined = Joined(leaves, parts[0].dims)
        found: dict[int, LossTerms] = {}
        forms = []
        for index, part in enumerate(parts):
            key = index if part.pairs else part.samples
            if key not in found or not found[key].holds(leaves[index], joined):
                found[key] = self._form(part, outputs[index], parts=parts, leaves=(leaves[index], joined))
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
        sizes = [each.samples for each in parts]
        if len(self._forms) > FORMS and key not in self._forms:
            self._forms.clear()
        if not self._is_kept(key, sizes, leaves) or (donor is not None and not self._is_clear(key)):
            try:
                found: LossTerms | UnprovedError = self._read(part, output, donor, parts)
            except UnprovedError as error:
                found = error
            self._forms[key] = found, trace, sizes
        found = self._forms[key][0]
        if isinstance(found, UnprovedError):
            raise found
        return found

    def _is_kept(self, key: Any, sizes: Sequence[int], leaves: tuple[Leaves, Leaves] | None) -> bool:
        """Returns True if the form with this key is that of a microbatch of a batch of these sizes, with these leaves
        and those of the whole batch.
        """
        if key not in self._forms:
            return False
        found, _, its = self._forms[key]
        if isinstance(found, UnprovedError):
            return not found.depends
        return not any(found.seen) or (leaves is not None and sum(its) == sum(sizes) and found.holds(*leaves))

    def _is_clear(self, key: Any) -> bool:
        found = self._forms[key][0]
        return isinstance(found, LossTerms) and found.is_clear

    def _read(self, part: LossPart, output: object, donor: LossPart | None, parts: Sequence[LossPart]) -> LossTerms:
        mine = self.recorded(part, output, None if donor is None else Scalars())

        @cache
        def other() -> Other | None:
            made = (
                [partial(LossPart.whole, parts, self.leaves_of)] if (mine.seen or mine.read) and len(parts) > 1 else []
            )
            is_whole = bool(mine.seen and made) and self._context.data.size == 1
            more = dict.fromkeys((part.samples if part.pairs else 1, part.samples))  # halves stay halves
            made += [partial(part.larger, each, donor or part, self.leaves_of) for each in more]
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

    def leaves_of(self, entries: dict[str, Any]) -> list[Any]:
        """The leaves of a microbatch's inputs, in the order in which a trace numbers them."""
        return leaves_of(entries, self._stage)

    def recorded(self, part: LossPart, output: object, scalars: Scalars | None = None) -> Recorded:
        """How the loss of a microbatch is computed. With `scalars`, it is traced anew, and these are recorded."""
        device, count = self._context.device, len(self.leaves_of(part.entries))
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


def _by_size(parts: Sequence[LossPart], made: Callable[[int], T]) -> list[T]:
    """What is made of each microbatch by its number, once for all of a size unless the caller has divided the batch."""
    found: dict[int, T] = {}
    keys = [index if part.pairs else part.samples for index, part in enumerate(parts)]
    return [found[key] if key in found else found.setdefault(key, made(index)) for index, key in enumerate(keys)]
