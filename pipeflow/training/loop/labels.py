"""The labels of a batch, for hooks of an evaluation."""

from __future__ import annotations

from typing import Any

from pipeflow.runtime.divided import Divided
from pipeflow.runtime.microbatch import merge


def labels_of(batch: Any, *, merged: bool) -> object:
    """The labels of a batch of inputs and labels; None if they are among named inputs. Those of a divided batch are
    `merged` as outputs are, or else None.
    """
    parts: list[Any] = batch.microbatches if isinstance(batch, Divided) else [batch]
    labels = [None if isinstance(part, dict) else part[1] for part in parts]
    if len(labels) == 1:
        return labels[0]
    return merge(labels) if merged else None
