"""Cross entropy of logits that are split over the vocabulary, with two collectives in the forward and none in the
backward.

Source: Shoeybi et al., arXiv 1909.08053, section 3 (the loss is computed on the split logits).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional
from torch.overrides import handle_torch_function, has_torch_function

from pipeflow.core.errors import UsageError
from pipeflow.engine.parallel.sharding import real_rows
from pipeflow.engine.parallel.transport.protocol import Alone, Group
from pipeflow.engine.tensor.layer import TensorLayer, group_of, require_indices
from pipeflow.engine.torch_private.modes import FakeTensor

Reduction = Literal["mean", "sum", "none"]


def shifted_labels(labels: Tensor, ignore_index: int = -100) -> Tensor:
    """The label of each token, (batch, length): the next token's; that of the last one does not count."""
    return functional.pad(labels[:, 1:], (0, 1), value=ignore_index)


class VocabParallelCrossEntropy(TensorLayer):
    """nn.CrossEntropyLoss of split logits, by `vocab_parallel_cross_entropy`.

    Args:
        vocab_size: number of classes without the padding at the end; by default the columns of all ranks together.
        label_smoothing: share of the probability that is spread over all classes, from 0 to 1.
        ignore_index: label that does not count.
        reduction: "mean" over the labels that count, "sum", or "none" for a loss per label.
        group: the tensor ranks; by default the tensor group of the context, or a group of one without a launch.
    """

    def __init__(
        self,
        *,
        vocab_size: int | None = None,
        label_smoothing: float = 0.0,
        ignore_index: int = -100,
        reduction: Reduction = "mean",
        group: Group | None = None,
    ) -> None:
        super().__init__()
        self.join(group)
        _require_options(label_smoothing, reduction)
        self.vocab_size, self.label_smoothing = vocab_size, label_smoothing
        self.ignore_index: int = ignore_index
        self.reduction: Reduction = reduction

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        return self._compute(logits, labels, self.classes)

    @property
    def classes(self) -> Group:
        """The ranks that divide the classes of the logits of a VocabParallelClassifier."""
        return self.group if self.grid is None else self.grid.features

    @property
    def weigh(self) -> Callable[[Tensor], float] | None:
        """What the mean of a microbatch is divided by, from its labels: how many count. A sum is divided by nothing."""
        return None if self.reduction == "sum" else lambda labels: float((labels != self.ignore_index).sum())

    def _compute(self, logits: Tensor, labels: Tensor, group: Group) -> Tensor:
        return vocab_parallel_cross_entropy(
            logits,
            labels,
            vocab_size=self.vocab_size,
            label_smoothing=self.label_smoothing,
            ignore_index=self.ignore_index,
            reduction=self.reduction,
            group=group,
            parts=group.size if self.grid is None or group.size == 1 else self.grid.grid.sample_parts,
        )

    @classmethod
    def from_native_module(
        cls, module: nn.CrossEntropyLoss, group: Group | None = None, *, vocab_size: int | None = None
    ) -> Self:
        """The loss of `module` on split logits. Raises UsageError for a loss with class weights."""
        cls._require_native(module, nn.CrossEntropyLoss)
        if module.weight is not None:
            raise UsageError(f"{cls.__name__} has no class weights: make the loss without them")
        options: dict[str, Any] = {name: getattr(module, name) for name in _OPTIONS}
        return cls(vocab_size=vocab_size, group=group, **options).train(module.training)

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={getattr(self, name)}" for name in ("vocab_size", *_OPTIONS))


class CrossEntropy(VocabParallelCrossEntropy):
    """nn.CrossEntropyLoss of logits whose last dimension is the classes, whole or split over the tensor ranks.

    Logits with vocab_size columns are whole; with ceil(vocab_size / T) columns they are split. Other sizes raise
    UsageError. Without vocab_size, logits are treated as whole.

    Args:
        vocab_size: number of classes, without padding.
        label_smoothing: share of the probability that is spread over all classes, from 0 to 1.
        ignore_index: label that does not count.
        reduction: "mean" over the labels that count, "sum", or "none" for a loss per label.
        group: the tensor ranks; by default the tensor group of the context, or a group of one without a launch.
    """

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        is_whole = self.vocab_size in (None, logits.shape[-1])
        return self._compute(logits, labels, Alone() if is_whole else self.classes)


_OPTIONS = ("label_smoothing", "ignore_index", "reduction")


def vocab_parallel_cross_entropy(
    logits: Tensor,
    labels: Tensor,
    *,
    vocab_size: int | None = None,
    label_smoothing: float = 0.0,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    group: Group | None = None,
    parts: int | None = None,
) -> Tensor:
    """The cross entropy of split logits, the same on every rank, in float32 (float64 for float64 logits).

    Args:
        logits: this rank's logits (..., C), as returned by VocabParallelClassifier. They are not modified.
        labels: labels (...), the same on every rank, from 0 to vocab_size - 1, or `ignore_index`.
        vocab_size: number of classes without the padding at the end, which gets no probability; by default C x T, where
            T is the number of tensor ranks.
        label_smoothing: share of the probability that is spread over all classes, from 0 to 1.
        ignore_index: label that does not count.
        reduction: "mean" over the labels that count (nan if there are none), "sum", or "none" for a loss per label.
        group: the tensor ranks; by default the tensor group of the context, or a group of one without a launch.
        parts: number of equal parts into which the vocabulary was padded, a multiple of T; by default T.

    Raises UsageError for other labels (on a GPU a device assertion fails instead), and for shapes that do not fit.
    """
    _require_options(label_smoothing, reduction)
    group = group_of(group)
    columns = logits.shape[-1]
    classes = columns * group.size if vocab_size is None else vocab_size
    parts = group.size if parts is None else parts
    wanted = -(-classes // parts) * (parts // group.size)
    if columns != wanted or logits.shape[:-1] != labels.shape:
        raise UsageError(
            f"a vocabulary of {classes} over {group.size} tensor ranks takes logits of shape (..., {wanted}) and "
            f"labels of shape (...), got {tuple(logits.shape)} and {tuple(labels.shape)}"
        )
    ignored = labels == ignore_index
    require_indices(labels.masked_fill(ignored, 0), classes, "labels")
    if group.size == 1 or isinstance(logits, FakeTensor):  # in a trace only the operators count, and nobody answers
        return whole_cross_entropy(logits, labels, label_smoothing, ignore_index, reduction)
    losses = split_losses(logits, labels, ignored, classes, label_smoothing, group)
    if reduction == "none":
        return losses
    return losses.sum() if reduction == "sum" else losses.sum() / (~ignored).sum()


def split_losses(
    logits: Tensor, labels: Tensor, ignored: Tensor, classes: int, smoothing: float, group: Group
) -> Tensor:
    """The loss of each label, 0 where it is ignored. A subclass of Tensor sees a call with its logits, as it sees those
    of torch's functions.
    """
    given = (logits, labels, ignored, classes, smoothing, group)
    if type(logits) is not Tensor and has_torch_function((logits,)):
        found: Tensor = handle_torch_function(split_losses, (logits,), *given)
    else:
        found = _CrossEntropy.apply(*given)  # type: ignore[no-untyped-call]  # torch's
    return found


def whole_cross_entropy(
    logits: Tensor, labels: Tensor, label_smoothing: float, ignore_index: int, reduction: Reduction
) -> Tensor:
    """The loss computed by torch, for whole logits whose last dimension is the classes."""
    options: dict[str, Any] = {"ignore_index": ignore_index, "label_smoothing": label_smoothing, "reduction": reduction}
    loss = functional.cross_entropy(_precise(logits).reshape(-1, logits.shape[-1]), labels.flatten(), **options)
    return loss.view(labels.shape) if reduction == "none" else loss


def _require_options(label_smoothing: float, reduction: str) -> None:
    if not 0 <= label_smoothing <= 1:
        raise UsageError(f"label_smoothing must be from 0 to 1, got {label_smoothing}")
    if reduction not in ("mean", "sum", "none"):
        raise UsageError(f'reduction must be "mean", "sum" or "none", got {reduction!r}')


def _precise(logits: Tensor) -> Tensor:
    return logits if logits.dtype is torch.float64 else logits.float()


class _CrossEntropy(Function):
    """Per label: log sum exp - (1 - s) x its logit - s x the mean logit, where s is the smoothing."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels: Tensor, ignored: Tensor, classes: int, smoothing: float, group: Group
    ) -> Tensor:
        columns = logits.shape[-1]
        real = real_rows(classes, columns, group.rank)
        scores = _precise(logits[..., :real])
        largest = scores.amax(-1) if real else scores.new_full(labels.shape, -torch.inf)
        group.all_reduce_max(largest).wait()
        scores = scores - largest.unsqueeze(-1)
        local = labels - group.rank * columns
        mine = (local >= 0) & (local < real) & ~ignored
        local = local.masked_fill(~mine, 0)
        sums = scores.new_zeros(3, *labels.shape)
        if real:
            sums[1] = scores.gather(-1, local.unsqueeze(-1)).squeeze(-1).masked_fill_(~mine, 0)
            if smoothing:
                torch.sum(scores, -1, out=sums[2])
            torch.sum(scores.exp_(), -1, out=sums[0])
        group.all_reduce(sums).wait()
        total, target, everything = sums
        probabilities = scores.div_(total.unsqueeze(-1))
        ctx.save_for_backward(probabilities, local, mine, ignored)
        ctx.of = logits.shape, logits.dtype, classes, smoothing
        losses: Tensor = total.log() - (1 - smoothing) * target - smoothing / classes * everything
        return losses.masked_fill(ignored, 0)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise UsageError("a backward with create_graph=True cannot run through vocab_parallel_cross_entropy")
        probabilities, local, mine, ignored = ctx.saved_tensors
        shape, dtype, classes, smoothing = ctx.of
        gradient = gradient.masked_fill(ignored, 0)
        of_scores = (probabilities - smoothing / classes).mul_(gradient.unsqueeze(-1))
        if of_scores.shape[-1]:
            of_label = gradient.masked_fill(~mine, 0).mul_(smoothing - 1)
            of_scores.scatter_add_(-1, local.unsqueeze(-1), of_label.unsqueeze(-1))
        padding = shape[-1] - of_scores.shape[-1]
        whole = functional.pad(of_scores, (0, padding)) if padding else of_scores
        return whole.to(dtype), None, None, None, None, None
