"""The loss that a module computes itself, and how much a microbatch weighs in it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from math import isclose
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from pipeflow.core.errors import UsageError
from pipeflow.stages.reductions import Constant, Mean, Sum, Terms

IGNORED = -100
"""The label that torch's losses ignore by default."""


def loss_in(output: object) -> Tensor | None:
    """The loss in a module's output: a scalar, `output.loss`, `output["loss"]`, or the first of a tuple."""
    found: object = output
    if isinstance(output, Mapping):
        found = output.get("loss")
    elif isinstance(output, tuple | list):
        found = getattr(output, "loss", output[0] if output else None)
    elif not isinstance(output, Tensor):
        found = getattr(output, "loss", None)
    return found if isinstance(found, Tensor) and not found.dim() else None


def own_loss(output: object, labels: object) -> Tensor:
    """The module's own loss as a criterion. Raises UsageError if there is none."""
    loss = loss_in(output)
    if loss is None:
        raise UsageError(
            f"the module returned a {type(output).__name__} without a loss: pass from_module(criterion=...), or "
            "include the labels in batches from which it computes one"
        )
    return loss


class Weighing:
    """A `weigh` that was read from a loss: the number of labels that count, or the number of samples if the labels are
    no tensor of integers.

    Args:
        ignored: the label that does not count.
        skipped: the number of labels at the start of each sequence that do not count, since a language model does not
            predict them.
        classes: the weight of each class, with which its labels count; None for 1.
        adds: True if the loss is a sum, so that microbatches are added up, and labels do not matter.
        leaf: index of the labels among the leaves, if a tree is passed in which they are.

    Attributes:
        is_mixed: True if the loss has a mean over samples, too, so that this is exact only if all labels count.
    """

    is_mixed = False

    def __init__(
        self,
        ignored: int = IGNORED,
        skipped: int = 0,
        classes: Tensor | None = None,
        *,
        adds: bool = False,
        leaf: int | None = None,
    ) -> None:
        self.ignored, self.skipped, self.adds, self.leaf = ignored, skipped, adds, leaf
        self.classes = None if classes is None else classes.detach().to("cpu", torch.float64)

    def __call__(self, labels: object) -> float:
        if self.adds:
            return 1.0
        labels = labels if self.leaf is None else tree_leaves(labels)[self.leaf]
        if not isinstance(labels, Tensor):  # the loss chooses among them
            return next((float(len(each)) for each in tree_leaves(labels) if isinstance(each, Tensor)), 1.0)
        if labels.is_floating_point():  # probabilities of classes, whose mean is over samples
            return float(len(labels))
        counted = labels[:, self.skipped :] if self.skipped else labels
        if self.classes is None:
            return float((counted != self.ignored).sum())
        return float(self.classes[counted[counted != self.ignored].cpu()].sum())

    def fits(self, mean: Mean, labels: object, *, exactly: bool = False) -> bool:
        """Returns True if a mean over targets is one over the labels that count here, which may have other numbers
        unless `exactly` is set.
        """
        if not isinstance(labels, Tensor) or labels.is_floating_point() or labels.dim() < 1 + bool(self.skipped):
            return False
        assert mean.target is not None
        mine, its = labels[:, self.skipped :] if self.skipped else labels, mean.target
        mine, its = mine[mine != self.ignored], its[its != mean.ignored]
        # models may count the labels that others ignore by default, and give them other numbers
        is_renumbered = not exactly and mean.ignored == IGNORED and self.classes is None and labels.dim() > 1
        return mine.shape == its.shape and (is_renumbered or torch.equal(mine, its.to(mine.dtype)))


class Made(NamedTuple):
    """How a loss is made: what it is the sum of, the means over targets that were computed, and the numbers that the
    forward read from the batch.
    """

    terms: Terms
    targets: Sequence[Mean]
    read: Set[float]


def weigh_by(
    made: Made, labels: object, samples: int, other: Callable[[], tuple[Made | None, int]]
) -> tuple[Weighing | None, bool]:
    """The function that weighs a microbatch in the module's own loss, None for its number of samples, and whether that
    is certain.

    Args:
        made: how the loss of a microbatch is made.
        labels: its labels, none of which may be IGNORED; or a tree in which they are.
        samples: its number of samples.
        other: function that returns the same for a microbatch of another size, and the size.
    """
    fitting = [each for mean in made.targets if (each := _over_labels(mean, labels)) is not None]
    guess = (fitting[0] if fitting else None), False
    if made.terms is None:
        return guess
    counts = [term.divisor for term in made.terms if isinstance(term, Mean) and term.target is not None]
    found: list[Weighing | None] = []
    for index, term in enumerate(made.terms):
        match term:
            case Mean(target=None):
                if not _grows(term, samples, index, *other()):
                    return guess
                found.append(None)
            case Mean():
                weighing = _over_labels(term, labels)
                if weighing is None and (term.entries % samples or term.divisor != term.entries):
                    return guess
                found.append(weighing)
            case Sum(divisor=None):
                adds = _adds(index, term, made, samples, other())
                if adds is None:
                    return guess
                found.append(Weighing(adds=True) if adds else None)
            case Sum() if not any(isclose(term.divisor or 0.0, count, rel_tol=1e-6) for count in counts):
                return guess
    sums = any(each is not None and each.adds for each in found)
    alike = {
        None if each is None else (each.ignored, each.skipped, each.adds, each.leaf, _listed(each.classes))
        for each in found
    }
    if len(alike) > 1 or (sums and Constant() in made.terms):
        labelled = [each for each in found if each is not None]
        if len(alike) == 2 and len(labelled) < len(found) and not sums and labelled[0].classes is None:
            labelled[0].is_mixed = True
            return labelled[0], False
        return guess
    return (found[0] if found else None), True


def _listed(classes: Tensor | None) -> tuple[float, ...]:
    return () if classes is None else tuple(classes.tolist())


def _over_labels(mean: Mean, labels: object) -> Weighing | None:
    """The weighing by labels of a mean over targets; None if the targets are others. In a tree of labels, a leaf with
    the targets' own numbers is preferred.
    """
    leaves: list[tuple[int | None, object]] = [*enumerate(tree_leaves(labels))]
    for exactly in (True, False):
        for leaf, each in [(None, labels)] if isinstance(labels, Tensor) else leaves:
            for skipped in (0, 1):
                found = Weighing(mean.ignored, skipped, mean.weight, leaf=leaf)
                if found.fits(mean, each, exactly=exactly):
                    return found
    return None


def _grows(term: Mean | Sum, samples: int, index: int, its: Made | None, its_samples: int) -> bool:
    """Returns True if the number of entries that a term is made of is proportional to the number of samples. It is not
    if samples were put together before, as in a mean over dim 0, or are picked.
    """
    if not its_samples:
        return term.entries % samples == 0  # a single sample: there is nothing to split
    same = its.terms[index] if its is not None and its.terms is not None and index < len(its.terms) else None
    return isinstance(same, type(term)) and same.entries * samples == term.entries * its_samples


def _adds(index: int, term: Sum, made: Made, samples: int, other: tuple[Made | None, int]) -> bool | None:
    """Whether a term is a sum over samples; False if it is a mean, because its factor falls with their number. None if
    that is not known.
    """
    factor, (its, its_samples) = abs(term.factor), other
    if not _grows(term, samples, index, its, its_samples):
        return None
    if not its_samples:
        return True
    if factor != 1 and any(
        number and (isclose(factor * abs(number), 1) or isclose(factor, abs(number))) for number in made.read
    ):
        return None
    same = its.terms[index] if its is not None and its.terms is not None else None
    if not isinstance(same, Sum):
        return None
    if isclose(abs(same.factor), factor):
        return True
    return False if isclose(abs(same.factor) * its_samples, factor * samples) else None


def all_counted(labels: object) -> object:
    """The labels with IGNORED ones replaced, for a trace."""
    if not isinstance(labels, Tensor) or labels.is_floating_point() or labels.dtype is torch.bool or not labels.numel():
        return labels
    return torch.where(labels == IGNORED, labels.max().clamp(min=0), labels)
