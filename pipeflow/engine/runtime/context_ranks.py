"""Context ranks: which tokens of a batch this rank computes, the loss of these tokens, and what cannot be divided so.
Must not contain: attention, which is the layers', and sums, in which a context rank counts as one more replica.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from pipeflow.core.errors import UsageError
from pipeflow.engine.parallel.context import Context
from pipeflow.engine.parallel.sharding import own_tokens
from pipeflow.engine.runtime.microbatch import Batch
from pipeflow.engine.runtime.original import root_of
from pipeflow.engine.runtime.positions import DOCUMENTS, documents_of

TOKENS = ("input_ids", "position_ids")  # the entries of a batch that have a number for each token
ALONE = "or launch with context=1"


class ContextTokens:
    """Takes the tokens of one context rank out of batches, which every context rank reads whole.

    The loss of a batch is the mean over the labels that count, of all context ranks. So each rank's loss is weighed by
    the number of its labels that count, as with replicas.

    Args:
        context: the context of this rank, with several context ranks.
        criterion: the loss. It has `shifted(labels)`, which gives each token its label, and `of_shifted`, the mean loss
            of tokens with such labels, whose `weigh` counts the labels. None if the Pipeline has no loss.
        refused: arguments of the Pipeline, by name, that do not fit context ranks; false where they are not given.

    Attributes:
        criterion: the loss of this rank's tokens.

    Raises UsageError for losses and arguments that do not fit context ranks.
    """

    def __init__(
        self,
        context: Context,
        criterion: Callable[..., Tensor] | None,
        refused: Mapping[str, object],
    ) -> None:
        for name in (name for name, given in refused.items() if given):
            raise UsageError(f"context ranks do not go together with {name}=: leave it out, {ALONE}")
        self._rank, self._ranks = context.context_rank, context.context_size
        self.criterion: Callable[..., Tensor] | None = None
        if criterion is None:
            return
        loss: Any = criterion
        if not (hasattr(loss, "shifted") and getattr(getattr(loss, "of_shifted", None), "weigh", None)):
            raise UsageError(
                "context ranks need a loss that shifts labels before tokens are divided, and "
                f"{getattr(criterion, '__name__', type(criterion).__name__)} is not known to do so: use "
                f"GPTLMLoss(), {ALONE}"
            )
        self.criterion, self._shifted = loss.of_shifted, loss.shifted

    def own(self, batch: Batch, *, of_module: bool = False) -> Batch:
        """The part of `batch` that has this rank's tokens.

        Args:
            batch: the whole batch.
            of_module: whether its entries are those of a module that was cut, which may count positions itself.

        Raises UsageError for a batch that cannot be divided.
        """
        if batch.is_divided:
            raise UsageError(f"context ranks need a batch that is not divided: pass the whole batch, {ALONE}")
        if not isinstance(batch.inputs, dict) or "input_ids" not in batch.inputs:
            raise UsageError('context ranks need a dict of inputs, as in ({"input_ids": tokens}, tokens)')
        inputs = {name: entry for name, entry in batch.inputs.items() if entry is not None}
        if of_module and inputs.get("labels") is batch.labels:  # which the criterion takes
            inputs.pop("labels", None)
        if "attention_mask" in inputs:
            raise UsageError(f"context ranks take no attention_mask: leave it out of the batch, {ALONE}")
        if others := [name for name in inputs if name not in TOKENS]:
            raise UsageError(f"it is not known how context ranks divide the entry {others[0]!r}: leave it out, {ALONE}")
        tokens = inputs["input_ids"]
        for name, entry in {**inputs, "labels": batch.labels}.items():
            if entry is not None:
                self._require_fits(name, entry, tokens)
        labels = None
        if self.criterion is not None and batch.labels is not None:
            labels = self._part(self._shifted(batch.labels))
        parts = {name: self._part(entry) for name, entry in inputs.items()}
        documents = documents_of(replace(batch, inputs=inputs), "context ranks") if of_module else None
        if documents is not None:
            parts[DOCUMENTS] = documents
        return replace(batch, inputs=parts, labels=labels, whole=batch)

    def _part(self, entry: Tensor) -> Tensor:
        return own_tokens(entry, self._rank, self._ranks, dim=1)

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


def require_stages(chunks: Iterable[nn.Module]) -> None:
    """Raises UsageError for a stage that does not say `shares_tokens`: it computes over context ranks."""
    for root in map(root_of, chunks):
        if not getattr(root, "shares_tokens", False):
            raise UsageError(
                f"context ranks need stages that exchange keys and values, and {type(root).__name__} is not known to "
                f"do so: use a GPTStage, call share_tokens(model) before from_module, {ALONE}"
            )


def require_no_outputs(asked: object) -> None:
    """Raises UsageError if a call asks for outputs, of which each context rank has those of its tokens."""
    if asked:
        raise UsageError(
            "outputs cannot be returned over context ranks, since each has those of its own tokens: leave "
            f"return_outputs out, {ALONE}"
        )
