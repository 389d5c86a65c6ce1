"""ByLength: a collate function that divides each batch by the lengths of its samples. Must not contain: how
microbatches are formed, which `order_for` decides.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

from pipeflow.analysis.memory_cap import MemoryCap
from pipeflow.analysis.simulation import simulate
from pipeflow.core.cost import CostModel
from pipeflow.core.errors import UsageError
from pipeflow.core.schedule import Schedule
from pipeflow.parallel.context import context_if_launched
from pipeflow.runtime.divided import Divided
from pipeflow.schedules.batch_order import order_for
from pipeflow.schedules.families import schedules_on


def length_of(sample: Any) -> int:
    """The number of tokens of a sample: the length of its `input_ids`, or of the first entry of a pair. Raises
    UsageError for another sample.
    """
    try:
        return len(sample["input_ids"] if isinstance(sample, dict) else sample[0])
    except (KeyError, TypeError, IndexError):
        raise UsageError(f"the length of a {type(sample).__name__} is not known: pass ByLength(length=)") from None


class ByLength:
    """A collate function for batches whose samples have different lengths. It is passed to a loader, or as
    `data_collator` to transformers' Trainer. It forms microbatches of like cost, which `collate` makes one by one, and
    chooses the schedule of each batch (`pipeflow.order_for`). All ranks of a replica read the same samples, so all find
    the same order.

    A schedule is chosen that keeps no more activations than `schedule`: this one, or a named one of its placement. Each
    is compiled when it is first used. With replicas it is always `schedule`, since all of them run the same one. A
    loader with workers plans in them, beside the training.

    Args:
        collate: makes a batch of a list of samples.
        schedule: the schedule of the Pipeline, which has the placement and the number of microbatches. A batch with
            fewer samples has as many microbatches as samples.
        cost: times and bytes of a mean microbatch. None: all stages take the same time.
        length: returns the length of a sample; by default `length_of`.
        padded: whether `collate` pads samples to the longest one. False if it packs them.
        quadratic, bytes_cap, budget: as in `order_for`.

    Attributes:
        undivided: `collate`, which evaluations use.
    """

    def __init__(
        self,
        collate: Callable[[list[Any]], Any],
        schedule: Schedule,
        cost: CostModel | None = None,
        *,
        length: Callable[[Any], float] = length_of,
        padded: bool = True,
        quadratic: float = 0.0,
        bytes_cap: MemoryCap | None = None,
        budget: float = 0.05,
    ) -> None:
        self.undivided = collate
        self._schedule = schedule
        self._cost = CostModel.even(schedule.placement) if cost is None else cost
        self._length = length
        context = context_if_launched()
        self._has_replicas = context is not None and context.data_size > 1
        self._options: dict[str, Any] = {
            "padded": padded,
            "quadratic": quadratic,
            "bytes_cap": bytes_cap,
            "budget": budget,
        }

    def __call__(self, samples: Sequence[Any]) -> Divided:
        many = min(self._schedule.num_microbatches, len(samples))
        usual = self._schedule.first(many)
        order = order_for(
            [self._length(sample) for sample in samples],
            self._schedule.placement,
            self._cost,
            many,
            among=(usual,) if self._has_replicas else _frugal(usual),
            **self._options,
        )
        parts = [self.undivided([samples[index] for index in group]) for group in order.groups]
        return Divided(parts, order.schedule)


@lru_cache(maxsize=8)
def _frugal(schedule: Schedule) -> tuple[Schedule, ...]:
    """The schedule, and the named ones of its placement that keep no more on any rank."""
    most = simulate(schedule).peak_activations
    named = schedules_on(schedule.placement, schedule.num_microbatches)
    peaks = ((each, simulate(each).peak_activations) for each in named)
    return schedule, *(each for each, kept in peaks if max(kept) <= max(most) and each.rows != schedule.rows)
