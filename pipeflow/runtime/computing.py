"""computing: steps of a Pipeline that run another forward than the module's own, such as one that computes another loss
from what the module returns. Must not contain: how a forward is traced and cut.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from typing import Any

from pipeflow.core.errors import UsageError
from pipeflow.runtime.divided import Divided
from pipeflow.runtime.from_module import counted, resized
from pipeflow.runtime.microbatch import Batch, as_batch
from pipeflow.runtime.pipeline import Pipeline
from pipeflow.stages.entries import LABELS
from pipeflow.stages.loss import Made, Weighing, own_loss, weigh_by
from pipeflow.stages.stage import ModuleStage


@contextmanager
def computing(
    model: Pipeline,
    forward: Callable[..., Any],
    weigh: Callable[..., float] | None = None,
    *,
    has_loss: bool = True,
) -> Iterator[None]:
    """Inside the `with` block, steps run `forward(module, **entries)` in place of the module's own forward.

    Args:
        model: a Pipeline of a cut module.
        forward: function that calls `module`, once, and returns its loss, or a tuple that starts with it. `module` is a
            stage's copy of the whole module, whose own forward it has during the call. Equal functions share plans.
        weigh: as in `Pipeline`.
        has_loss: False for a forward without a loss, for evaluations.

    Cuts, parameters and their owners stay as they are. Raises UsageError for a Pipeline of chunks; a step raises it for
    a forward that cannot be cut where the module was.
    """
    stages = _stages(model)
    runner, planner = model.runner, stages[0].planner

    def _with_labels(batch: object) -> tuple[dict[str, Any], object]:
        """A batch without labels has a loss all the same."""
        entries, labels = planner.entries.of(batch)
        return entries, next(iter(entries.values())) if labels is None else labels

    before = runner.read, runner.criterion, runner.weigh
    with planner.computing(forward, [stage.root for stage in stages]):
        runner.read = _with_labels if has_loss else planner.entries.of
        runner.criterion, runner.weigh = own_loss, weigh
        try:
            yield
        finally:
            runner.read, runner.criterion, runner.weigh = before


def weighing(model: Pipeline, batch: object, another: object = None) -> tuple[Weighing | None, bool]:
    """How microbatches weigh in the loss of the forward that runs now: by their labels, or None for their samples; and
    whether that is certain. It traces the first microbatch of `batch`, and one of another size. For a divided batch,
    that is `another`, a batch of one microbatch.
    """
    stage = _stages(model)[0]
    planner, made = stage.planner, _batch(model, batch)
    entries = counted(made.split(made.inputs)[0])
    loss = planner.plan(entries, stage.root).trace.loss
    if loss is None:
        return None, False

    @cache
    def other() -> tuple[Made | None, int]:
        entries, size = _resized(model, batch, made, another)
        try:
            return (planner.observed(entries, lambda *_: nullcontext())[0].loss if size else None), size
        except Exception:  # whatever the forward raises
            return None, size

    weigh, is_certain = weigh_by(loss, entries.get(LABELS), made.sizes[0], other)
    return weigh, is_certain and not (weigh is not None and weigh.adds and not other()[1])


def _resized(model: Pipeline, batch: object, made: Batch, another: object) -> tuple[dict[str, Any], int]:
    """The entries of a microbatch of another size than the first, and this size, which is 0 if there is none."""
    if not isinstance(batch, Divided):
        return resized(made)
    for each in batch if another is None else [another]:
        more = _batch(model, Divided([each]))
        if more.sizes != made.sizes[:1]:
            return counted(more.split(more.inputs)[0]), more.sizes[0]
    return resized(as_batch(batch.microbatches[0], 1, model.context.device, _stages(model)[0].planner.entries.of))


def _batch(model: Pipeline, batch: object) -> Batch:
    read = _stages(model)[0].planner.entries.of
    return as_batch(batch, model.schedule.num_microbatches, model.context.device, read)


def _stages(model: Pipeline) -> list[ModuleStage]:
    stages = [chunk for chunk in model.chunks if isinstance(chunk, ModuleStage)]
    if len(stages) < len(model.chunks):
        raise UsageError("only a Pipeline made by from_module can run another forward: this one was made from chunks")
    return stages
