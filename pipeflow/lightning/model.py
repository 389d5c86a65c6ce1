"""StepModel: a LightningModule whose steps run in a pipeline, which is cut at the first batch. Must not contain: the
Trainer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from pipeflow.accelerate.model import PreparedModel, Settings, samples_of
from pipeflow.core.errors import UsageError
from pipeflow.huggingface.training.replicas import shared_outputs
from pipeflow.lightning.step import TRAINING, Running, stepping
from pipeflow.parallel.context import Context
from pipeflow.runtime.execution import execute_pipeline
from pipeflow.runtime.from_module import traced_otherwise
from pipeflow.runtime.held import held_step
from pipeflow.runtime.microbatch import Batch, as_batch
from pipeflow.runtime.pipeline import Pipeline
from pipeflow.stages.loss import Made, weigh_by
from pipeflow.stages.stage import ModuleStage


class StepModel(PreparedModel):
    """A LightningModule of which each rank runs its stages. All ranks call it together, those of a pipeline with the
    same batch.

    Args:
        module: the module. Once it is cut, it keeps the parameters of this rank; the others have no memory.
        settings: how it is cut and run.
        context: the context of this rank.
        trainer: the Trainer.
    """

    whole: Any

    def __init__(self, module: Any, settings: Settings, context: Context, trainer: Any) -> None:
        super().__init__(module, settings, context)
        vars(self)["whole"] = module
        self.running = Running(trainer)
        self._modes: list[bool] = []
        self._weighings: dict[str, list[Any]] = {}

    @contextmanager
    def layers(self) -> Iterator[None]:
        """Inside the `with` block, torch's random numbers are those of this rank's layers."""
        assert self.layer_random is not None
        with self.layer_random():
            yield

    def run(self, method: str, batch: Any, *places: int) -> Any:
        """Runs a step of a batch, logs what it logs, and returns what it returns, on every rank.

        Args:
            method: name of the step. After "training_step", the loss has a graph that leads to the gradients.
            batch: the batch.
            places: further arguments of the step, such as the index of the batch.

        Raises UsageError as `Pipeline.from_module` and `execute_pipeline` do.
        """
        self.running.places = places
        entries = {"labels": batch, "method": method}
        self._make(entries)
        self._set_modes()
        outputs = self._trained(entries) if method == TRAINING else self._evaluated(entries)
        result = self._whole(method, entries, outputs)
        loss = self.step.loss if method == TRAINING and self.step is not None else None
        for name, value in result.get("logs", {}).items():
            options = self.running.options[method][name]
            if options.get("batch_size") is not None:  # that of a microbatch
                options = {**options, "batch_size": samples_of(entries)}
            self.whole.log(name, value, **options)
        if loss is None:
            return result.get("rest")
        return {"loss": loss, **result["rest"]} if "rest" in result else loss

    def _make(self, entries: dict[str, Any]) -> None:
        """Cuts the module with a first batch, by its training step."""
        if isinstance(self.inner, Pipeline):
            return
        whole: Any = self.inner
        with stepping(whole, self.running):
            try:
                super()._make({**entries, "method": TRAINING})
            except UsageError as error:
                raise UsageError(
                    f"{type(whole).__name__}.training_step cannot be cut into stages ({error}); it must compute its "
                    "loss from the batch by calling its modules, and it was traced on the first batch of the run"
                ) from error
        _keep_own(whole, self.pipeline)

    def _set_modes(self) -> None:
        """Gives the stages the modes of the module, which the Trainer sets."""
        modes = {name: module.training for name, module in self.whole.named_modules()}
        if [*modes.values()] == self._modes:
            return
        self._modes = [*modes.values()]
        for chunk in self.pipeline.chunks:
            assert isinstance(chunk, ModuleStage)
            chunk.training = modes[""]
            for name, module in chunk.root.named_modules():
                module.training = modes[name]

    def _trained(self, entries: dict[str, Any]) -> Any:
        with self.layers():
            self.step = held_step(
                iter([(entries, entries["labels"])]),
                self.pipeline,
                schedule=self._schedule(entries),
                gradient_scale=self._settings.gradient_scale(),
                return_outputs=True,
            )
        return self.step.outputs

    def _evaluated(self, entries: dict[str, Any]) -> Any:
        with self.layers():
            batch = iter([(entries, None)])
            return execute_pipeline(batch, self.pipeline, forward_only=True, return_outputs=True).outputs

    def _whole(self, method: str, entries: dict[str, Any], outputs: Any) -> dict[str, Any]:
        """The result of a whole batch, on every rank, from those of its microbatches."""
        with self.pipeline.alarm.raised_everywhere():
            leaves, spec = tree_flatten(shared_outputs(outputs, self._context))
        batch = as_batch((entries, None), self._schedule(entries).num_microbatches, self._context.device)
        parts = batch.split(entries)
        if method not in self._weighings:
            self._weighings[method] = self._weighing_of(parts[0], batch)
        samples = [float(size) for size in batch.sizes]

        def merged(leaf: Any, weigh: Any) -> Any:
            if weigh is False:
                return leaf
            weights = samples if weigh is None else [weigh(part["labels"]) for part in parts]
            return _mean(leaf, weights, adds=getattr(weigh, "adds", False))

        leaves = [merged(*each) for each in zip(leaves, self._weighings[method], strict=True)]
        result: dict[str, Any] = tree_unflatten(leaves, spec)
        return result

    def _weighing_of(self, part: dict[str, Any], batch: Batch) -> list[Any]:
        """For each leaf of a step's result, what weighs its microbatches: a function, None for the number of samples,
        or False for a leaf that is no scalar.
        """
        stage = self.pipeline.chunks[0]
        assert isinstance(stage, ModuleStage)
        planner = stage.planner
        traced = cache(lambda: traced_otherwise(batch, planner, planner.module))

        def weighing(index: int, made: Made | None) -> Any:
            def other() -> tuple[Made | None, int]:
                trace, size = traced()
                return None if trace is None else trace.scalars[index], size

            return False if made is None else weigh_by(made, part["labels"], batch.sizes[0], other)[0]

        return [weighing(*each) for each in enumerate(planner.plan(part, stage.root).trace.scalars)]


def _mean(values: Tensor, weights: Sequence[float], *, adds: bool) -> Tensor:
    """The mean, or sum, of a number of each microbatch; those without weight, such as without labels, may be nan."""
    factors = torch.tensor(weights, dtype=torch.float64, device=values.device)
    total = torch.where(factors == 0, 0.0, values.double() * factors).sum()
    return (total if adds else total / factors.sum()).to(values.dtype)


def _keep_own(whole: nn.Module, pipeline: Pipeline) -> None:
    """Leaves the parameters of this rank in the module, and frees the others."""
    own: Mapping[str, nn.Parameter] = dict(pipeline.named_parameters(remove_duplicate=False))
    for prefix, module in whole.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                here = own.get(f"{prefix}.{name}" if prefix else name)
                module._parameters[name] = _without_memory(parameter) if here is None else here


def _without_memory(parameter: nn.Parameter) -> nn.Parameter:
    return nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
