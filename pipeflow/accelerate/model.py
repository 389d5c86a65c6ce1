"""PreparedModel: the model that `Accelerator.prepare` returns. A call in training runs a whole step of the pipeline,
whose gradients wait for the backward of its loss. Must not contain: accelerate's names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from pipeflow.accelerate.outputs import AskedLoss, LazyOutput, StepOutput
from pipeflow.accelerate.random_states import LayerRandom
from pipeflow.core.errors import UsageError
from pipeflow.core.schedule import Schedule
from pipeflow.optim.whole import names_of
from pipeflow.parallel.context import Context
from pipeflow.parallel.trees import shared_outputs
from pipeflow.runtime.execution import execute_pipeline
from pipeflow.runtime.held import HeldStep, held_step
from pipeflow.runtime.pipeline import Pipeline
from pipeflow.stages.entries import Entries
from pipeflow.stages.stage import ModuleStage


@dataclass(frozen=True)
class Settings:
    """How a prepared model is cut and run.

    Attributes:
        schedule: the schedule of its steps.
        options: further arguments of `Pipeline.from_module`.
        gradient_scale: function that returns the factor that `Accelerator.backward` gives to the gradients of a loss.
    """

    schedule: Schedule
    options: Mapping[str, Any]
    gradient_scale: Callable[[], float]


class PreparedModel(nn.Module):
    """The whole module until its first call, then this rank's part of it. All ranks call it together, those of a
    pipeline with the same batch.

    Args:
        module: the whole module, the same on every rank.
        settings: how it is cut and run.
        context: the context of this rank.

    Attributes:
        names: the names of the whole module's parameters, by their ids.
        step: the last step in training; None before there is one, and after a call without gradients.
        layer_random: the random numbers of this rank's layers; None before the first call.
    """

    def __init__(self, module: nn.Module, settings: Settings, context: Context) -> None:
        super().__init__()
        self.training = module.training
        self.inner = module
        self.names = names_of(module)
        self.step: HeldStep | None = None
        self.layer_random: LayerRandom | None = None
        self._settings = settings
        self._context = context
        self._entries = Entries(module)
        self._waiting: list[Callable[[Pipeline], None]] = []
        self._has_loss = self._is_bare = False  # of the module's output, as found when it is cut

    @property
    def pipeline(self) -> Pipeline:
        """The Pipeline. Raises UsageError before the first call."""
        if not isinstance(self.inner, Pipeline):
            raise UsageError("the model is cut when it is first called: call it with a batch before this")
        return self.inner

    def when_made(self, action: Callable[[Pipeline], None]) -> None:
        """Calls `action` with the Pipeline, now or as soon as there is one."""
        if isinstance(self.inner, Pipeline):
            action(self.inner)
        else:
            self._waiting.append(action)

    @contextmanager
    def layers(self) -> Iterator[None]:
        """Inside the `with` block, torch's random numbers are those of this rank's layers."""
        assert self.layer_random is not None
        with self.layer_random():
            yield

    def unwrap(self) -> nn.Module:
        """Returns the whole module; once it is cut, this rank's first stage of it."""
        first = self.inner.chunks[0] if isinstance(self.inner, Pipeline) else self.inner
        return first.root if isinstance(first, ModuleStage) else first

    def forward(self, *arguments: Any, **entries: Any) -> Any:
        """Runs a batch. In training, returns an object whose `loss` is that of the step, or an output that a function
        of torch.nn.functional makes a loss of. Otherwise returns the module's output, on every rank.

        Raises UsageError if the last loss is still to be differentiated, and as `Pipeline.from_module` and
        `execute_pipeline` do.
        """
        self.require_released()
        if arguments:
            entries = {**self._entries.of((arguments, None))[0], **entries}
        batch = self._entries.of(entries)
        self._make(batch[0])
        self.step = None
        if not (self.training and torch.is_grad_enabled()):
            return self._evaluate(batch)
        if self._has_loss:
            loss = self._train(batch, None)
            return loss if self._is_bare else StepOutput(loss)
        return LazyOutput(
            lambda asked: self._train((batch[0], asked.labels(samples_of(batch[0]))), asked), self._context.device
        )

    def require_released(self) -> None:
        """Raises UsageError if the last loss is still to be differentiated."""
        if self._is_waiting:
            raise UsageError(
                "the model was called again before the backward of its last loss: call accelerator.backward(loss), or "
                "fabric.backward(loss), after each call, and accumulate batches with accelerator.accumulate(model); "
                "evaluate with model.eval() under torch.no_grad()"
            )

    @property
    def _is_waiting(self) -> bool:
        return self.step is not None and not self.step.is_released

    def _make(self, entries: dict[str, Any]) -> None:
        """Makes the Pipeline with a first batch, unless there is one."""
        if isinstance(self.inner, Pipeline):
            return
        with torch.enable_grad():
            made = Pipeline.from_module(self.inner, self._schedule(entries), entries, **self._settings.options)
        assert made.cut is not None
        trace = made.cut.trace
        self._has_loss, self._is_bare = trace.loss is not None, trace.returned.is_bare
        self.inner = made.train(self.training)
        made.runner.read = _as_it_is
        self.layer_random = LayerRandom(self._context)
        for action in self._waiting:
            action(made)
        self._waiting.clear()

    def _schedule(self, entries: dict[str, Any]) -> Schedule:
        """The schedule for a batch, with fewer microbatches if it has fewer samples."""
        schedule, samples = self._settings.schedule, samples_of(entries)
        return schedule.first(samples) if 0 < samples < schedule.num_microbatches else schedule

    def _train(self, batch: tuple[dict[str, Any], object], asked: AskedLoss | None) -> Tensor:
        pipeline = self.pipeline
        if self._is_waiting:
            raise UsageError("the output has a loss already: compute one loss of it, and call backward for it")
        if asked is not None:
            pipeline.runner.criterion, pipeline.runner.weigh = asked, asked.weigh
        with self.layers():
            self.step = held_step(
                iter([batch]),
                pipeline,
                schedule=self._schedule(batch[0]),
                gradient_scale=self._settings.gradient_scale(),
            )
        return self.step.loss

    def _evaluate(self, batch: tuple[dict[str, Any], object]) -> Any:
        pipeline, makes_loss = self.pipeline, self._has_loss and batch[1] is not None
        with self.layers():
            told = execute_pipeline(
                iter([(batch[0], batch[1] if makes_loss else None)]),
                pipeline,
                forward_only=True,
                return_outputs=True,
                broadcast_loss=makes_loss,
            )
            with pipeline.alarm.raised_everywhere():
                outputs = shared_outputs(_without_caches(told.outputs), self._context)
        return _with_loss(outputs, told.loss) if makes_loss else outputs

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Yields this rank's parameters by their names in the module."""
        return self.inner.named_parameters(prefix, recurse, remove_duplicate)

    def state_dict(self, *arguments: Any, **options: Any) -> Any:
        """The weights of this rank, by their names in the module."""
        return self.inner.state_dict(*arguments, **options)

    def train(self, mode: bool = True) -> Self:
        """Sets the mode of the module."""
        super().train(mode)
        return self


def _as_it_is(batch: Any) -> tuple[object, object]:
    return batch  # type: ignore[no-any-return]  # a pair, as `Entries.of` makes


def samples_of(entries: Mapping[str, Any]) -> int:
    """Number of samples in a batch."""
    return next((len(each) for each in tree_leaves(dict(entries)) if isinstance(each, Tensor) and each.dim()), 0)


def _without_caches(outputs: Any) -> Any:
    """Outputs with None for each part that is not made of tensors, such as a cache for generating text."""
    for name, part in [*outputs.items()] if isinstance(outputs, Mapping) else []:
        if not all(isinstance(leaf, Tensor | bool | int | float | str | None) for leaf in tree_leaves(part)):
            outputs[name] = None
    return outputs


def _with_loss(outputs: Any, loss: Tensor | None) -> Any:
    """Outputs of a batch, of which `loss` is the mean; the module's own are those of its microbatches."""
    if isinstance(outputs, Tensor):
        return loss
    if isinstance(outputs, Mapping) and "loss" in outputs:
        outputs["loss"] = loss  # type: ignore[index]  # a dict, or a ModelOutput
    elif isinstance(outputs, tuple | list) and outputs:
        return type(outputs)([loss, *outputs[1:]])
    return outputs
