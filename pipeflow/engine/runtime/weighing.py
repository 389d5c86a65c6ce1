"""Weighing: what each microbatch's loss is multiplied by, so that the losses of all microbatches add up to that of the
batch. Must not contain: how a loss is read, which is in `divisors`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from torch import Tensor

from pipeflow.core.errors import UsageError
from pipeflow.engine.parallel.context import Context
from pipeflow.engine.runtime.divisors import Divisors
from pipeflow.engine.runtime.loss import share_of
from pipeflow.engine.runtime.loss_parts import shapes_of
from pipeflow.engine.runtime.microbatch import Batch
from pipeflow.engine.runtime.program.results import Results
from pipeflow.engine.runtime.stage import Stage
from pipeflow.engine.runtime.weights import UNKNOWN, weights_by
from pipeflow.engine.runtime.whole_loss import WholeLoss
from pipeflow.engine.stages.stage import ModuleStage


class Weigher:
    """Finds the weights of the microbatches of each batch, for the last stage.

    Args:
        context: the context of this rank.
        over_batch: True if the loss is computed once, for the whole batch.
    """

    def __init__(self, context: Context, *, over_batch: bool) -> None:
        self._context, self._over_batch = context, over_batch
        self._divisors: tuple[object, Divisors] | None = None  # with the key of their criterion

    def load(
        self,
        results: Results,
        batch: Batch,
        criterion: Callable[..., Tensor],
        weigh: Callable[..., float] | None,
        last: Stage,
        *,
        training: bool,
    ) -> None:
        """Puts the weights into the results, now or as soon as the last stage has an output. In training, all replicas
        do so together. In evaluation they do so only for terms that are divided by different numbers.
        """
        if self._over_batch:
            labels = replace(batch, sizes=[sum(batch.sizes)], leaves=[]).split(batch.labels)[0]
            results.whole = WholeLoss(len(batch.sizes), labels)
            results.weights, results.weight = [1.0] * len(batch.sizes), float(sum(batch.sizes))
            return
        if weigh is not None:
            results.weights, results.weight, *_ = weights_by(batch, results.labels, weigh)
            return
        divisors = self._divisors_of(criterion, last)

        def settle(output: object, microbatch: int) -> None:
            outputs = divisors.outputs(batch, results.labels, output, microbatch)
            found = divisors.weights(batch, last.keywords, results.labels, outputs)
            assert found is not None
            results.weights, results.weight, results.scaling, results.counted = found
            results.settle = partial(_require_shapes, list(map(shapes_of, outputs)))
            if training:
                results.gradient_scale *= share_of(results, self._context)

        weights = divisors.weights(batch, last.keywords, results.labels)
        if weights is None:
            results.settle = settle
            return
        results.weights, results.weight, results.scaling, results.counted = weights
        if results.scaling is not None:
            last.call = results.scaling.watched(last.call)

    def _divisors_of(self, criterion: Callable[..., Tensor], last: Stage) -> Divisors:
        key = getattr(criterion, "key", criterion)
        if self._divisors is None or self._divisors[0] != key:
            stage = last.module if isinstance(last.module, ModuleStage) else None
            self._divisors = key, Divisors(criterion, stage, self._context)
        return self._divisors[1]


def _require_shapes(expected: Sequence[list[tuple[int, ...]]], output: object, microbatch: int) -> None:
    """Raises UsageError if an output has other shapes than the weights were found with."""
    if (found := shapes_of(output)) != expected[microbatch]:
        why = (
            f"microbatch {microbatch} has outputs of shapes {found}, but {expected[microbatch]} follow from another one"
        )
        raise UsageError(UNKNOWN.format(loss="the criterion's loss", why=why))
