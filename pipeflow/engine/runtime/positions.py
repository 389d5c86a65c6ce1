"""Positions: what the position of each token says where tokens of a sequence are shared, over context ranks or slices.
Must not contain: how a sequence is divided.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pipeflow.core.errors import UsageError
from pipeflow.engine.runtime.microbatch import Batch, EntryParts

DOCUMENTS = "documents"
"""The entry with the number of each token's document, (samples, tokens of whole sequences), which attention takes. The
number -1 - n is that of padding of document n.
"""


def documents_of(batch: Batch, who: str, mask: Tensor | None = None) -> Tensor | EntryParts | None:
    """The document of each token, by positions that begin at 0 in each; None if each sequence is one document without
    padding. With a mask, each sequence is one document, whatever its positions, as models of transformers have it.

    Args:
        batch: the batch as it was read, without `mask`.
        who: what shares the tokens, such as "slices".
        mask: 0 for each token of padding, (samples, tokens); None if there is no mask.

    Raises UsageError unless an entry says the position of each token: a module that counts positions itself would begin
    at 0 in each part of a sequence.
    """
    if "attention_mask" in batch.named:
        raise UsageError(f"attention_mask is not possible with {who}: leave it out, and give padding the label -100")
    entry = batch.named.get("position_ids")
    parts = entry.values if isinstance(entry, EntryParts) else [entry]
    found = [_documents(part) if mask is None else _padding(part, mask) for part in parts]
    if any(each is None for each in found):
        raise UsageError(
            f"{who} need position_ids in each batch, which count from 0 in each sequence, or in each of its documents: "
            'add {"position_ids": torch.arange(length).expand(samples, length)}, also to the example of from_module'
        )
    if not any(bool(each.any()) for each in found if each is not None):
        return None
    return EntryParts([*found]) if isinstance(entry, EntryParts) else found[0]


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
