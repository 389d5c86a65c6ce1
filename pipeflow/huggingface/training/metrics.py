"""Metrics that trainers of TRL collect while they compute a loss, which only ranks with the last stage do. Must not
contain: metrics of evaluations, which transformers computes.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from pipeflow.parallel.context import Context
from pipeflow.parallel.transport.agreement import all_gather_object

METRICS = "_metrics"
"""The attribute of a trainer in which it collects them, by mode and name."""
_TOKENS, _SEEN = "num_tokens", "_total_train_tokens"


def share_metrics(trainer: Any, context: Context) -> None:
    """Gives every rank the means of what the microbatches of all replicas collected since the last log. Numbers of
    tokens are added up over the replicas. All ranks call it together.
    """
    collected = getattr(trainer, METRICS, None)
    if collected is None:
        return
    mode = "train" if trainer.model.training else "eval"
    everyone: list[Any] = all_gather_object(context.world, (dict(collected[mode]), getattr(trainer, _SEEN, 0)))
    size = len(everyone) // context.data_size
    tellers = [
        next((told for told in everyone[first : first + size] if told[0]), None)
        for first in range(0, len(everyone), size)
    ]
    told = [each for each in tellers if each is not None]
    values = {
        name: [value for metrics, _ in told for value in metrics.get(name, [])]
        for metrics, _ in told
        for name in metrics
    }
    if _TOKENS in values:
        values[_TOKENS] = [float(sum(seen for _, seen in told))]
    collected[mode] = defaultdict(list, {name: [sum(each) / len(each)] for name, each in values.items() if each})
