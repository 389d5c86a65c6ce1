"""Context ranks: which tokens of a batch this rank computes, the loss of these tokens, and what cannot be divided so.
Must not contain: attention, which is the layers', and sums, in which a context rank counts as one more replica.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from pipeflow.core.errors import UsageError
from pipeflow.engine.parallel.context import Context
from pipeflow.engine.parallel.sharding import own_tokens
from pipeflow.engine.runtime.microbatch import Batch
from pipeflow.engine.runtime.sharing import CONTEXT, DOCUMENTS, MASK
from pipeflow.engine.stages.criterion import own_loss
from pipeflow.engine.stages.entries import LABELS

PER_TOKEN = ("input_ids", "position_ids", "token_type_ids")  # the entries of a batch that have a number for each token
SHIFTED = "shift_labels"  # an entry with the label of each token, from which a module computes its own loss
ALONE = f"or {CONTEXT.whole}"


class ContextTokens:
    """Takes the tokens of one context rank out of batches, which every context rank reads whole.

    The loss of a batch is the mean over the labels that count, of all context ranks. So each rank's loss is weighed by
    the number of its labels that count, as with replicas.

    Args:
        context: the context of this rank, with several context ranks.
        criterion: the loss, as `Sharing.require_loss` has it. Or it is `own_loss` of a module that has `shifted` and
            takes such labels as `shift_labels`. None if the Pipeline has no loss.
        refused: arguments of the Pipeline, as they are written, that do not fit context ranks; false if not given.

    Attributes:
        criterion: the loss of this rank's tokens.
        whole: the loss as it was given.

    Raises UsageError for losses and arguments that do not fit context ranks.
    """

    def __init__(
        self,
        context: Context,
        criterion: Callable[..., Tensor] | None,
        refused: Mapping[str, object],
    ) -> None:
        CONTEXT.require_none(refused)
        self._rank, self._ranks = context.context_rank, context.context_size
        self.criterion = self.whole = criterion
        self._is_own = criterion is own_loss
        if criterion is not None and not self._is_own:
            CONTEXT.require_loss(criterion)
            self.criterion = cast(Any, criterion).of_shifted

    def own(
        self,
        batch: Batch,
        module: nn.Module | None = None,
        cut: Callable[[int], Sequence[int]] | None = None,
        *,
        balances: bool = False,
    ) -> Batch:
        """The part of `batch` that has this rank's tokens. Raises UsageError for a batch that cannot be divided.

        Args:
            batch: the whole batch.
            module: the module that was cut, which may count positions and compute its loss itself; None if none was.
            cut: where a sequence of so many tokens is cut into slices, each of which is divided like a sequence; None:
                sequences are whole.
            balances: whether the module computes a balance loss of its tokens, which a mask would leave out.
        """
        if batch.is_divided:
            raise UsageError(f"context ranks need a batch that is not divided: pass the whole batch, {ALONE}")
        entries: Any = batch.inputs
        inner = entries.get(LABELS) if isinstance(entries, dict) else None
        if isinstance(inner, dict) and module is not None:  # the module is a step, which gets a batch as one entry
            found = self.own(replace(batch, inputs=inner, labels=inner.get(LABELS)), module, balances=balances).inputs
            labels = None if batch.labels is None else found
            return replace(batch, inputs={**entries, LABELS: found}, labels=labels, whole=batch)
        if not isinstance(batch.inputs, dict) or "input_ids" not in batch.inputs:
            raise UsageError('context ranks need a dict of inputs, as in ({"input_ids": tokens}, tokens)')
        inputs = {name: entry for name, entry in batch.inputs.items() if entry is not None}
        if module is not None and inputs.get(LABELS) is batch.labels:
            inputs.pop(LABELS, None)
        if MASK in inputs and module is None:
            raise CONTEXT.mask_error()
        if MASK in inputs and balances:
            raise UsageError(f"context ranks take no {MASK} with a balance loss of experts: leave out either, {ALONE}")
        if others := [name for name in inputs if name not in (*PER_TOKEN, MASK)]:
            raise UsageError(f"it is not known how context ranks divide the entry {others[0]!r}: leave it out, {ALONE}")
        tokens = inputs["input_ids"]
        for name, entry in {**inputs, LABELS: batch.labels}.items():
            if entry is not None:
                self._require_fits(name, entry, tokens)
        mask = inputs.pop(MASK, None)
        ends = (tokens.shape[1],) if cut is None else cut(tokens.shape[1])
        found = replace(batch, inputs=inputs)
        found = found if module is None else CONTEXT.with_documents(found, mask)
        parts = {name: each if name == DOCUMENTS else self._part(each, ends) for name, each in found.named.items()}
        if self.criterion is None or batch.labels is None:
            return replace(batch, inputs=parts, labels=None, whole=batch)
        loss: Any = module if self._is_own else self.whole
        if not hasattr(loss, "shifted"):
            CONTEXT.require_loss(own_loss)
        labels = self._part(loss.shifted(batch.labels), ends)
        if self._is_own:
            parts |= {LABELS: labels, SHIFTED: labels}
        return replace(batch, inputs=parts, labels=labels, whole=batch)

    def _part(self, entry: Any, ends: Sequence[int]) -> Tensor:
        """This rank's tokens of each slice."""
        slices: Sequence[Tensor] = entry.tensor_split(ends[:-1], dim=1)
        return torch.cat([own_tokens(part, self._rank, self._ranks, dim=1) for part in slices], 1)

    def _require_fits(self, name: str, entry: object, tokens: object) -> None:
        """Raises UsageError unless an entry has one number for each token, and the tokens can be divided equally."""
        if not isinstance(entry, Tensor) or entry.dim() != 2 or entry.shape != getattr(tokens, "shape", None):
            found = tuple(entry.shape) if isinstance(entry, Tensor) else f"a {type(entry).__name__}"
            raise UsageError(
                f"context ranks need an entry for each token of input_ids, (batch, length), but {name!r} is {found}"
            )
        if (length := entry.shape[1]) % (2 * self._ranks):
            raise UsageError(
                f"sequences of {length} tokens have no {2 * self._ranks} equal parts for {self._ranks} context ranks: "
                f"pad them to a multiple of {2 * self._ranks}, with labels of -100"
            )


def require_no_outputs(asked: object) -> None:
    """Raises UsageError if a call asks for outputs, of which each context rank has those of its tokens."""
    if asked:
        raise UsageError(
            "outputs cannot be returned over context ranks, since each has those of its own tokens: leave "
            f"return_outputs out, set prediction_loss_only=True in a Trainer, {ALONE}"
        )
