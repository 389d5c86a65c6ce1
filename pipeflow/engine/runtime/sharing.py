"""Sharing: what context ranks and slices, which share the tokens of sequences, need of stages, losses, arguments and
batches. Must not contain: how a sequence is divided.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pipeflow.core.errors import UsageError
from pipeflow.engine.runtime.microbatch import Batch, EntryParts
from pipeflow.engine.runtime.original import root_of
from pipeflow.engine.stages.criterion import own_loss

MASK = "attention_mask"
DOCUMENTS = "documents"
"""The entry with the number of each token's document, (samples, tokens of whole sequences), which attention takes. The
number -1 - n is that of padding of document n.
"""


class Sharing(NamedTuple):
    """How a sequence is shared.

    Attributes:
        who: what shares its tokens.
        whole: what to write for whole sequences.
    """

    who: str
    whole: str

    def require_stages(self, stages: Iterable[nn.Module]) -> None:
        """Raises UsageError for a stage that does not say `shares_tokens`: it computes with tokens of other parts."""
        for root in map(root_of, stages):
            if not getattr(root, "shares_tokens", False):
                raise UsageError(
                    f"{self.who} need stages that exchange keys and values, and {root._get_name()} is not known to "
                    f"do so: use a GPTStage, call share_tokens(model) before from_module, or {self.whole}"
                )

    def require_loss(self, loss: Any) -> None:
        """Raises UsageError for a loss without `shifted(labels)`, which gives each token its label, and without
        `of_shifted`, the mean loss of tokens with such labels, whose `weigh` counts the labels.
        """
        if not (hasattr(loss, "shifted") and getattr(getattr(loss, "of_shifted", None), "weigh", None)):
            name = "the module's own loss" if loss is own_loss else getattr(loss, "__name__", type(loss).__name__)
            raise UsageError(
                f"{self.who} need a loss that shifts labels before tokens are divided, and {name} is not known to do "
                f"so: pass criterion=GPTLMLoss(), CausalLMLoss() or MaskedLMLoss(), or {self.whole}"
            )

    def require_none(self, given: Mapping[str, object]) -> None:
        """Raises UsageError for an argument that is not false, by what the user writes for it."""
        for name in (name for name, value in given.items() if value):
            raise UsageError(f"{self.who} do not go together with {name}: leave it out, or {self.whole}")

    def mask_error(self) -> UsageError:
        """The error for a mask of whole sequences."""
        return UsageError(
            f"{MASK} is not possible with {self.who}. A causal model needs none for padding at the end: leave it out, "
            f"and give padding the label -100; for other masks, {self.whole}"
        )

    def with_documents(self, batch: Batch, mask: Tensor | None = None) -> Batch:
        """The batch with the entry `DOCUMENTS`, by positions that begin at 0 in each document; without it if each
        sequence is one document without padding. With a mask, each sequence is one document, whatever its positions, as
        models of transformers have it.

        Args:
            batch: the batch as it was read, without `mask`.
            mask: 0 for each token of padding, (samples, tokens); None if there is no mask.

        Raises UsageError unless an entry says the position of each token: a module that counts positions itself would
        begin at 0 in each part of a sequence.
        """
        if MASK in batch.named:
            raise self.mask_error()
        entry = batch.named.get("position_ids")
        parts = entry.values if isinstance(entry, EntryParts) else [entry]
        found = [_documents(part) if mask is None else _padding(part, mask) for part in parts]
        if any(each is None for each in found):
            raise UsageError(
                f"{self.who} need position_ids in each batch, which count from 0 in each sequence, or in each of its "
                'documents: add {"position_ids": torch.arange(length).expand(samples, length)}, also to the example of '
                "from_module"
            )
        if not any(bool(each.any()) for each in found if each is not None):
            return batch
        documents = EntryParts([*found]) if isinstance(entry, EntryParts) else found[0]
        return replace(batch, inputs={**batch.named, DOCUMENTS: documents})


CONTEXT = Sharing("context ranks", "launch with context=1")
SLICES = Sharing("slices", "make the schedule with slices=1")


def _padding(positions: object, mask: Tensor) -> Tensor | None:
    """-1 for each token of padding, 0 for others; None if there are no positions."""
    return None if positions is None else -(mask == 0).to(torch.int32)


def _documents(positions: object) -> Tensor | None:
    """The number of the document of each token, from 0 in each sequence; None if these are no positions."""
    if not isinstance(positions, Tensor) or positions.dim() != 2 or positions.is_floating_point():
        return None
    begins = positions == 0
    goes_on = positions[:, 1:] == positions[:, :-1] + 1
    if not bool(begins[:, 0].all()) or not bool((begins[:, 1:] | goes_on).all()):
        return None
    return begins.cumsum(1, dtype=torch.int32) - 1
