"""CutModel: a model that scripts hand over whole, and that is cut when it gets its first batch; and WholeOutputs: what
it returns for a batch. Must not contain: how it is cut and called.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.optim import Optimizer

from pipeflow.core.errors import UsageError
from pipeflow.core.schedule import Schedule
from pipeflow.engine.runtime.microbatch import Batch, Divided, as_batch
from pipeflow.engine.runtime.pipeline import Pipeline
from pipeflow.engine.runtime.plain_values import PlainValues
from pipeflow.engine.stages.stage import ModuleStage
from pipeflow.training.optim.optimizer import WholeGroups, names_of


class CutModel(nn.Module):
    """The whole module until its Pipeline is made, then this rank's part of it.

    Args:
        module: the whole module, the same on every rank.

    Attributes:
        inner: the module, then its Pipeline.
        names: the names of the whole module's parameters, by their ids.
        groups: the groups of its optimizer; None before `keep_groups`.
    """

    uncut = "the model is cut when it is first called: call it with a batch before this"
    """What is said where a Pipeline is needed and there is none."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.training = module.training
        self.inner = module
        self.names = names_of(module)
        self.groups: WholeGroups | None = None
        self._waiting: list[Callable[[Pipeline], None]] = []

    @property
    def is_cut(self) -> bool:
        """True once there is a Pipeline."""
        return isinstance(self.inner, Pipeline)

    @property
    def pipeline(self) -> Pipeline:
        """The Pipeline. Raises UsageError before there is one."""
        if not isinstance(self.inner, Pipeline):
            raise UsageError(self.uncut)
        return self.inner

    def become(self, made: Pipeline) -> None:
        """Takes the Pipeline that was made of the module, and does what waits for it."""
        self.inner = made
        for action in self._waiting:
            action(made)
        self._waiting.clear()

    def when_made(self, action: Callable[[Pipeline], None]) -> None:
        """Calls `action` with the Pipeline, now or as soon as there is one."""
        if isinstance(self.inner, Pipeline):
            action(self.inner)
        else:
            self._waiting.append(action)

    def keep_groups(self, optimizer: Optimizer, names: Mapping[int, list[str]] | None = None) -> None:
        """Lets the groups of an optimizer of the whole module keep this rank's parameters when the model is cut. Raises
        UsageError as WholeGroups does.

        Args:
            optimizer: the optimizer.
            names: the names of its parameters by their ids; by default those of the module that was handed over.
        """
        self.groups = groups = WholeGroups(optimizer, self.names if names is None else names)
        self.when_made(lambda _: groups.keep(self.named_parameters(remove_duplicate=False)))

    def unwrap(self) -> nn.Module:
        """Returns the whole module; once it is cut, this rank's first stage of it."""
        first = self.inner.chunks[0] if isinstance(self.inner, Pipeline) else self.inner
        return first.root if isinstance(first, ModuleStage) else first

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Yields this rank's parameters by their names in the module."""
        return self.inner.named_parameters(prefix, recurse, remove_duplicate)


class WholeOutputs:
    """What the last stage returns, as outputs of whole batches: plain numbers beside its tensors are the batch's.

    Args:
        pipeline: a Pipeline of a cut module.
    """

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline
        self._plain = PlainValues(pipeline)

    def of(self, outputs: Any, batch: object, schedule: Schedule | None = None) -> Any:
        """The outputs of a batch.

        Args:
            outputs: those of the last stage, merged over the microbatches; None on other ranks.
            batch: the batch, as the Pipeline reads it.
            schedule: the schedule that ran it; by default the Pipeline's.
        """
        if outputs is None or isinstance(batch, Divided):
            return outputs
        return self._plain.whole(outputs, self._read(batch, schedule or self._pipeline.schedule))

    def has_loss(self, batch: object) -> bool:
        """True if the module computes a loss of its own of a batch, whatever its labels are called. All ranks of a
        pipeline call it together.
        """
        stage = self._pipeline.chunks[0]
        assert isinstance(stage, ModuleStage)
        with self._pipeline.alarm.raised_everywhere():
            made = self._read(batch, self._pipeline.schedule)
            return stage.planner.plan(made.split(made.inputs)[0], stage.root).trace.loss is not None

    def _read(self, batch: object, schedule: Schedule) -> Batch:
        runner, device = self._pipeline.runner, self._pipeline.context.device
        return as_batch(batch, schedule.num_microbatches, device, runner.read)


@contextmanager
def with_own_loss(pipeline: Pipeline) -> Iterator[None]:
    """Inside the `with` block, evaluations compute the module's own loss although no entry is called labels."""
    runner, read = pipeline.runner, pipeline.runner.read
    runner.read = lambda batch: (read(batch)[0], True)
    try:
        yield
    finally:
        runner.read = read
