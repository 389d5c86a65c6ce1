"""StepModel: a LightningModule whose steps run in a pipeline, which is cut at the first batch. Must not contain: the
Trainer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from pipeflow.accelerate.model import PreparedModel, Settings, samples_of
from pipeflow.core.errors import UsageError
from pipeflow.lightning.metrics import call_again
from pipeflow.lightning.results import Results
from pipeflow.lightning.step import TRAINING, Running, stepping
from pipeflow.parallel.context import Context
from pipeflow.runtime.execution import execute_pipeline
from pipeflow.runtime.held import held_step
from pipeflow.runtime.pipeline import Pipeline
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
        self.results: Results | None = None

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
        is_silent = method in self.running.silent
        outputs = (self._trained if method == TRAINING else self._evaluated)(entries, not is_silent)
        result = {} if is_silent else self._whole(outputs, entries)
        loss = self.step.loss if method == TRAINING and self.step is not None else None
        for name, more in result.get("lists", {}).items():
            vars(self.whole)[name].extend(more)
        values = call_again(self.whole, result.get("calls", {}))
        logs = dict(result.get("logs", {}))
        for name, source in self.running.metrics.get(method, {}).items():
            if source.is_in(values):
                logs[name] = source.of(self.whole, values)
        if loss is not None:
            logs |= dict.fromkeys(self.running.of_loss, loss.detach())
        for name, value in logs.items():
            options = self.running.options[method][name]
            if options.get("batch_size") is not None:  # that of a microbatch
                options = {**options, "batch_size": samples_of(entries)}
            self.whole.log(name, value, **options)
        if loss is None:
            return result.get("rest")
        return {"loss": loss, **result["rest"]} if "rest" in result else loss

    def _whole(self, outputs: Any, entries: dict[str, Any]) -> Any:
        results, method = self.results, entries["method"]
        assert results is not None
        result = results.whole(outputs, entries, self._schedule(entries).num_microbatches)
        if results.is_empty(method):
            self.running.silent.add(method)
        return result

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
        self.results = Results(self.pipeline)
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

    def _trained(self, entries: dict[str, Any], return_outputs: bool) -> Any:
        with self.layers():
            self.step = held_step(
                iter([(entries, entries["labels"])]),
                self.pipeline,
                schedule=self._schedule(entries),
                gradient_scale=self._settings.gradient_scale(),
                return_outputs=return_outputs,
            )
        return self.step.outputs

    def _evaluated(self, entries: dict[str, Any], return_outputs: bool) -> Any:
        batch = iter([(entries, None)])
        with self.layers():
            return execute_pipeline(batch, self.pipeline, forward_only=True, return_outputs=return_outputs).outputs


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
