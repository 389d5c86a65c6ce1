"""Positions: what the position of each token says where tokens of a sequence are shared, over context ranks or slices.
Must not contain: how a sequence is divided.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pipeflow.core.errors import UsageError
from pipeflow.engine.runtime.microbatch import Batch, EntryParts

DOCUMENTS = "documents"
"""The entry with the number of each token's document, (samples, tokens of whole sequences), which attention takes."""


def documents_of(batch: Batch, who: str) -> Tensor | EntryParts | None:
    """The document of each token, by positions that begin at 0 in each; None if each sequence is one document.

    Args:
        batch: the batch as it was read.
        who: what shares the tokens, such as "slices".

    Raises UsageError unless an entry says the position of each token: a module that counts positions itself would begin
    at 0 in each part of a sequence.
    """
    if "attention_mask" in batch.named:
        raise UsageError(f"attention_mask is not possible with {who}: leave it out, and give padding the label -100")
    entry = batch.named.get("position_ids")
    parts = entry.values if isinstance(entry, EntryParts) else [entry]
    found = [_documents(part) for part in parts]
    if any(each is None for each in found):
        raise UsageError(
            f"{who} need position_ids in each batch, which count from 0 in each sequence, or in each of its documents: "
            'add {"position_ids": torch.arange(length).expand(samples, length)}, also to the example of from_module'
        )
    if not any(bool(each.any()) for each in found if each is not None):
        return None
    return EntryParts([*found]) if isinstance(entry, EntryParts) else found[0]


def _documents(positions: object) -> Tensor | None:
    """The number of the document of each token, from 0 in each sequence; None if these are no positions."""
    if not isinstance(positions, Tensor) or positions.dim() != 2 or positions.is_floating_point():
        return None
    begins = positions == 0
    goes_on = positions[:, 1:] == positions[:, :-1] + 1
    if not bool(begins[:, 0].all()) or not bool((begins[:, 1:] | goes_on).all()):
        return None
    return begins.cumsum(1, dtype=torch.int32) - 1
