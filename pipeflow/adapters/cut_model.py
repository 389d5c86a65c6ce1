"""CutModel: a model that scripts hand over whole, and that is cut when it gets its first batch, as CutSettings say; and
what it returns for a batch. PreparedModel: one of which a call in training runs a whole step of the
pipeline, whose gradients wait for the backward of its loss. Must not contain: names of a library.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from pipeflow.adapters.batches import samples_of
from pipeflow.adapters.libraries import instead
from pipeflow.adapters.outputs import AskedLoss, LazyOutput, StepOutput
from pipeflow.adapters.random_states import OwnRandom, random_of_layers
from pipeflow.adapters.ranks import shared_outputs
from pipeflow.core.errors import UsageError
from pipeflow.core.schedule import Schedule
from pipeflow.engine.parallel.context import Context
from pipeflow.engine.runtime.microbatch import Batch, Divided, as_batch
from pipeflow.engine.runtime.other_calls import HeldStep, held_step
from pipeflow.engine.runtime.pipeline import Pipeline, execute_pipeline
from pipeflow.engine.runtime.plain_values import whole_values
from pipeflow.engine.runtime.program.results import require_whole_loss
from pipeflow.engine.runtime.step import LossOver, Output
from pipeflow.engine.stages.blocks import Blocks, Cuts
from pipeflow.engine.stages.criterion import own_loss
from pipeflow.engine.stages.entries import Entries
from pipeflow.engine.stages.stage import ModuleStage
from pipeflow.engine.torch_private.trees import tree_leaves
from pipeflow.schedules.registry import make_schedule
from pipeflow.training.checkpoint.load import load_checkpoint, load_options
from pipeflow.training.checkpoint.save import save_checkpoint
from pipeflow.training.optim.optimizer import WholeGroups, names_of


@dataclass(frozen=True)
class CutSettings:
    """How a model is cut and run.

    Attributes:
        schedule: the schedule of its steps.
        options: further arguments of `Pipeline.from_module`.
        gradient_scale: function that returns the factor that the library gives to the gradients of a loss: one over the
            number of accumulated batches.
    """

    schedule: Schedule
    options: Mapping[str, Any]
    gradient_scale: Callable[[], float]


def cut_settings(
    schedule: str,
    microbatches: int,
    schedule_options: Mapping[str, Any] | None,
    cuts: Cuts,
    blocks: Blocks,
    weigh: Callable[..., float] | None,
    loss_over: LossOver,
    head_slices: int | None,
    head: str | None,
    context: Context,
    autocast: torch.dtype | None,
    gradient_scale: Callable[[], float] = lambda: 1.0,
) -> CutSettings:
    """The settings that a script gives its library.

    Args:
        schedule: name of the schedule, as in `pipeflow.make_schedule`.
        microbatches: number of microbatches in a batch.
        schedule_options: further arguments of `pipeflow.make_schedule`.
        cuts, blocks, autocast: as in `Pipeline.from_module`.
        weigh, loss_over, head_slices: as in `Pipeline`.
        head: as in `Pipeline.from_module`.
        context: the context, whose pipeline has as many ranks as the schedule.
        gradient_scale: as in CutSettings.
    """
    made = make_schedule(schedule, ranks=context.pipeline_size, microbatches=microbatches, **(schedule_options or {}))
    options: dict[str, Any] = {"cuts": cuts, "blocks": blocks, "weigh": weigh, "loss_over": loss_over}
    options |= {"autocast": autocast, "head_slices": head_slices, "head": head}
    return CutSettings(made, options, gradient_scale)


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


def whole_outputs(outputs: Any, batch: object, pipeline: Pipeline, schedule: Schedule | None = None) -> Any:
    """What the last stage returns, as outputs of a whole batch: plain numbers beside its tensors are the batch's.

    Args:
        outputs: those of the last stage, merged over the microbatches; None on other ranks.
        batch: the batch, as the Pipeline reads it.
        pipeline: the Pipeline of a cut module.
        schedule: the schedule that ran it; by default the Pipeline's.
    """
    if outputs is None or isinstance(batch, Divided):
        return outputs
    return whole_values(outputs, _read(batch, pipeline, schedule or pipeline.schedule), pipeline)


def evaluate(
    batch: object, pipeline: Pipeline, *, is_named: bool, makes_loss: bool, return_outputs: bool = True
) -> Output:
    """Evaluates a batch.

    Args:
        batch: the batch, as the Pipeline reads it.
        pipeline: the Pipeline of a cut module.
        is_named: whether the batch has an entry called labels.
        makes_loss: whether the loss is computed, which is then known on every rank: also if the module computes one of
            its own without an entry of this name.
        return_outputs: as in `execute_pipeline`.
    """
    runner, read = pipeline.runner, pipeline.runner.read
    is_own = makes_loss and not is_named and _has_loss(batch, pipeline)
    with instead(vars(runner), read=lambda batch: (read(batch)[0], True)) if is_own else nullcontext():
        return execute_pipeline(
            iter([batch]),
            pipeline,
            forward_only=True,
            return_outputs=return_outputs,
            broadcast_loss=makes_loss and (is_named or is_own),
        )


def _has_loss(batch: object, pipeline: Pipeline) -> bool:
    """True if the module computes a loss of its own of a batch, whatever its labels are called."""
    stage = pipeline.chunks[0]
    assert isinstance(stage, ModuleStage)
    with pipeline.alarm.raised_everywhere():
        made = _read(batch, pipeline, pipeline.schedule)
        return stage.planner.plan(made.split(made.inputs)[0], stage.root).trace.loss is not None


def _read(batch: object, pipeline: Pipeline, schedule: Schedule) -> Batch:
    return as_batch(batch, schedule.num_microbatches, pipeline.context.device, pipeline.runner.read)


class PreparedModel(CutModel):
    """A model for loops in which a forward and a backward are two calls. All ranks call it together, those of a
    pipeline with the same batch.

    Args:
        module: the whole module, the same on every rank.
        settings: how it is cut and run.
        context: the context of this rank.

    Attributes:
        step: the last step in training; None before there is one, and after a call without gradients.
    """

    def __init__(self, module: nn.Module, settings: CutSettings, context: Context) -> None:
        super().__init__(module)
        self.step: HeldStep | None = None
        self._layer_random: OwnRandom | None = None
        self._settings = settings
        self._context = context
        self._entries = Entries(module)
        self._has_loss = self._is_bare = False  # of the module's output, as found when it is cut

    @contextmanager
    def layers(self) -> Iterator[None]:
        """Inside the `with` block, torch's random numbers are those of this rank's layers. Raises UsageError before
        the model is cut.
        """
        random = self._layer_random
        if random is None:
            raise UsageError(self.uncut)
        with random():
            yield

    @property
    def is_released(self) -> bool:
        """True if the gradients of the last step are in `.grad`."""
        return self.step is not None and self.step.is_released

    def save(self, folder: str | Path, optimizer: Any, *, step: int = 0, extra: object = None) -> None:
        """Saves the model, its optimizer (or None) and the random states of its layers as a checkpoint of pipeflow. All
        ranks call it together. Raises UsageError before the model is cut.
        """
        with self.layers():
            save_checkpoint(folder, self.pipeline, optimizer, step=step, extra=extra)

    def load(self, folder: Path, optimizer: Callable[[], Any]) -> None:
        """Loads what `save` wrote under any layout, when the model is cut. All ranks call it together.

        Args:
            folder: the folder.
            optimizer: function that returns the optimizer at that time, or None.
        """

        def load(made: Pipeline) -> None:
            with self.layers():
                load_checkpoint(folder, made, optimizer())

        self.when_made(load)

    def load_options(self, folder: Path, optimizer: Any) -> None:
        """Loads the options of the groups of its optimizer, which scripts may read before the model is cut."""
        if self.groups is not None:
            load_options(folder, optimizer, self.groups.names)

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
        if self._context.context_size > 1:
            raise UsageError(
                "context ranks cannot divide the labels of a loss that a script computes of an output: pass labels to "
                "the model, whose own loss shifts them, or launch with context=1"
            )
        return LazyOutput(
            lambda asked: self._train((batch[0], asked.labels(samples_of(batch[0]))), asked), self._context.device
        )

    def require_released(self) -> None:
        """Raises UsageError if the last loss is still to be differentiated."""
        if self._has_step_waiting:
            raise UsageError(
                "the model was called again before the backward of its last loss: call accelerator.backward(loss), or "
                "fabric.backward(loss), after each call, and accumulate batches with accelerator.accumulate(model); "
                "evaluate with model.eval() under torch.no_grad()"
            )

    @property
    def _has_step_waiting(self) -> bool:
        return self.step is not None and not self.step.is_released

    def _make(self, entries: dict[str, Any]) -> None:
        """Makes the Pipeline with a first batch, unless there is one."""
        if self.is_cut:
            return
        options = dict(self._settings.options)
        if options.get("loss_over") == "batch":
            options["criterion"] = _asked_later
        with torch.enable_grad():
            made = Pipeline.from_module(self.inner, self._settings.schedule, entries, **options)
        assert made.cut is not None
        trace = made.cut.trace
        if "criterion" in options and trace.loss is not None:
            require_whole_loss(self._context, own_loss)
        self._has_loss, self._is_bare = trace.loss is not None, trace.returned.spec.is_leaf()
        made.training = self.training
        made.runner.read = _as_it_is
        self._layer_random = random_of_layers(self._context)
        self.become(made)

    def _train(self, batch: tuple[dict[str, Any], object], asked: AskedLoss | None) -> Tensor:
        pipeline = self.pipeline
        if self._has_step_waiting:
            raise UsageError("the output has a loss already: compute one loss of it, and call backward for it")
        if asked is not None:
            pipeline.runner.criterion = asked
        with self.layers():
            self.step = held_step(iter([batch]), pipeline, gradient_scale=self._settings.gradient_scale())
        return self.step.loss

    def _evaluate(self, batch: tuple[dict[str, Any], object]) -> Any:
        (entries, labels), pipeline, makes_loss = batch, self.pipeline, self._has_loss
        read = (entries, labels if makes_loss else None)
        with self.layers():
            told = evaluate(read, pipeline, is_named=labels is not None, makes_loss=makes_loss)
            with pipeline.alarm.raised_everywhere():
                outputs = _without_caches(whole_outputs(told.outputs, (entries, None), pipeline))
                outputs = shared_outputs(outputs, self._context)
        return outputs if told.loss is None else _with_loss(outputs, told.loss)

    def state_dict(self, *arguments: Any, **options: Any) -> Any:
        """The weights of this rank, by their names in the module."""
        return self.inner.state_dict(*arguments, **options)


def _asked_later(output: Any, labels: Any) -> Tensor:
    """Takes the place of the loss that the script computes from an output."""
    raise NotImplementedError


def _as_it_is(batch: Any) -> tuple[object, object]:
    return batch  # type: ignore[no-any-return]  # a pair, as `Entries.of` makes


def _without_caches(outputs: Any) -> Any:
    """Outputs with None for each part that is not made of tensors, such as a cache for generating text."""
    for name, part in [*outputs.items()] if isinstance(outputs, Mapping) else []:
        if not all(isinstance(leaf, Tensor | bool | int | float | str | None) for leaf in tree_leaves(part)):
            outputs[name] = None
    return outputs


def _with_loss(outputs: Any, loss: Tensor) -> Any:
    """Outputs of a batch, of which `loss` is the mean; the module's own are those of its microbatches."""
    if isinstance(outputs, Tensor):
        return loss
    if isinstance(outputs, Mapping) and "loss" in outputs:
        outputs["loss"] = loss  # type: ignore[index]  # a dict, or a ModelOutput
    elif isinstance(outputs, tuple | list) and outputs:
        return type(outputs)([loss, *outputs[1:]])
    return outputs
