"""StepModel: a LightningModule whose steps run in a pipeline, which is cut at the first batch, and BatchResults: what
steps compute for microbatches, as results of whole batches on every rank. Must not contain: the Trainer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from pipeflow.adapters.batches import samples_of
from pipeflow.adapters.cut_model import CutSettings, PreparedModel
from pipeflow.adapters.lightning.steps import TRAINING, StepState, call_again, stepping
from pipeflow.adapters.lightning.tokens import require_divisible, share_tokens_of
from pipeflow.adapters.ranks import shared_outputs
from pipeflow.core.errors import UsageError
from pipeflow.engine.parallel.context import Context
from pipeflow.engine.parallel.transport.agreement import all_gather
from pipeflow.engine.runtime.microbatch import Batch, as_batch
from pipeflow.engine.runtime.other_calls import held_step
from pipeflow.engine.runtime.pipeline import Pipeline, execute_pipeline
from pipeflow.engine.runtime.plain_values import whole_values
from pipeflow.engine.runtime.weighing import Divisors
from pipeflow.engine.stages.criterion import own_loss
from pipeflow.engine.stages.stage import ModuleStage
from pipeflow.engine.torch_private.trees import keystr, tree_flatten_with_path, tree_unflatten

_OF_LIGHTNING = frozenset(vars(LightningModule()))


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

    def __init__(self, module: Any, settings: CutSettings, context: Context, trainer: Any) -> None:
        super().__init__(module, settings, context)
        vars(self)["whole"] = module
        self.running = StepState(trainer, over_context=context.context_size > 1)
        self.results: BatchResults | None = None

    def run(self, method: str, batch: Any, *places: int) -> Any:
        """Runs a step of a batch, logs what it logs, and returns what it returns, on every rank.

        Args:
            method: name of the step. After "training_step", the loss has a graph that leads to the gradients.
            batch: the batch.
            places: further arguments of the step, such as the index of the batch.

        Raises UsageError over context ranks for what they cannot divide, and as `Pipeline.from_module` and
        `execute_pipeline` do.
        """
        if self.running.over_context:
            require_divisible(method, batch)
        self.running.places = places
        entries = {"labels": batch, "method": method}
        self._make(entries)
        assert self.pipeline.runner.original is not None
        self.pipeline.runner.original.give_modes()  # which the Trainer, or a callback, may set before any step
        is_silent = self.running.over_context or method in self.running.silent
        outputs, loss = self._told(entries, return_outputs=not is_silent)
        result: dict[str, Any] = {}
        if not is_silent:
            assert self.results is not None
            result = self.results.whole(outputs, entries, self.pipeline.schedule.num_microbatches)
            if self.results.is_empty(method):
                self.running.silent.add(method)
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

    def _told(self, entries: dict[str, Any], *, return_outputs: bool) -> tuple[Any, Tensor | None]:
        """What the microbatches of a batch return, merged, and the loss of a training step."""
        with self.layers():
            if entries["method"] == TRAINING:
                batch, scale = iter([(entries, entries["labels"])]), self._settings.gradient_scale()
                self.step = held_step(batch, self.pipeline, gradient_scale=scale, return_outputs=return_outputs)
                return self.step.outputs, self.step.loss
            batch = iter([(entries, None)])
            told = execute_pipeline(batch, self.pipeline, forward_only=True, return_outputs=return_outputs)
            return told.outputs, None

    def _make(self, entries: dict[str, Any]) -> None:
        """Cuts the module with a first batch, by its training step."""
        if self.is_cut:
            return
        whole: Any = self.inner
        if self.running.over_context:
            share_tokens_of(whole)
        with stepping(whole, self.running):
            try:
                super()._make({**entries, "method": TRAINING})
            except UsageError as error:
                raise UsageError(
                    f"{type(whole).__name__}.training_step cannot be cut into stages ({error}); it must compute its "
                    "loss from the batch by calling its modules, and it was traced on the first batch of the run"
                ) from error
        self.results = BatchResults(self.pipeline)
        assert self.pipeline.runner.original is not None
        self.pipeline.runner.original.others = _OF_LIGHTNING
        keep_own(whole, self.pipeline)


def keep_own(whole: nn.Module, pipeline: Pipeline) -> None:
    """Leaves the parameters of this rank in the module, and frees the others."""
    own: Mapping[str, nn.Parameter] = dict(pipeline.named_parameters(remove_duplicate=False))
    for prefix, module in whole.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                here = own.get(f"{prefix}.{name}" if prefix else name)
                if here is None:
                    here = nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
                module._parameters[name] = here


class BatchResults:
    """Results of whole batches.

    Args:
        pipeline: the Pipeline that runs the steps.
    """

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline
        self._known: dict[str, tuple[Any, dict[str, Divisors | None]]] = {}

    def whole(self, outputs: Any, entries: dict[str, Any], microbatches: int) -> Any:
        """The result of a batch without its loss, on every rank of the pipeline, which call it together.

        Args:
            outputs: those of the last stage, merged over the microbatches; None on other ranks.
            entries: the batch, with the method that ran it.
            microbatches: how many microbatches it had at most.

        """
        pipeline = self._pipeline
        batch = as_batch((entries, None), microbatches, pipeline.context.device)
        method = entries["method"]
        if method not in self._known:
            self._known[method] = self._traced(batch)
        spec, known = self._known[method]
        with pipeline.alarm.raised_everywhere():
            outputs = None if outputs is None else whole_values(outputs, batch, pipeline)
            shared = self._shared(_without_loss(outputs), spec, known, len(batch.sizes))
        parts = cache(lambda: batch.split(batch.inputs))

        def merged(path: str, leaf: Any) -> Any:
            divisors = known.get(path)
            if divisors is None or not isinstance(leaf, Tensor) or leaf.shape != (len(batch.sizes),):
                return leaf
            return _sum(leaf, divisors.multipliers(batch, parts()))

        leaves, its_spec = tree_flatten_with_path(shared)
        return tree_unflatten([merged(keystr(path), leaf) for path, leaf in leaves], its_spec)

    def is_empty(self, method: str) -> bool:
        """True if the step `method`, which has run, has no result beside the loss."""
        return not self._known[method][1]

    def _traced(self, batch: Batch) -> tuple[Any, dict[str, Divisors | None]]:
        """What a trace tells of a step's result: its tree, and what each leaf, by its place, is divided by; None for a
        leaf that is no scalar.
        """
        stage = self._pipeline.chunks[0]
        assert isinstance(stage, ModuleStage)
        context, trace = self._pipeline.context, stage.planner.plan(batch.split(batch.inputs)[0], stage.root).trace
        found = [
            None if each is None else Divisors(own_loss, stage, context, at) for at, each in enumerate(trace.scalars)
        ]
        leaves, spec = tree_flatten_with_path(_without_loss(tree_unflatten(found, trace.returned.spec)))
        return spec, {keystr(path): divisors for path, divisors in leaves}

    def _shared(self, outputs: Any, spec: Any, known: Mapping[str, Divisors | None], microbatches: int) -> Any:
        """The outputs, on every rank. If all are numbers, as the trace says, one message is enough."""
        transport, many = self._pipeline.context.transport, len(known)
        if any(each is None for each in known.values()):
            return shared_outputs(outputs, self._pipeline.context)
        leaves = None if outputs is None else tree_flatten_with_path(outputs)[0]
        if not many:
            return {}
        mine = [0.0] * (1 + many * microbatches)
        if leaves is not None:
            is_known = [keystr(path) for path, _ in leaves] == [*known]
            mine[0] = 1.0 if is_known else 2.0
            if is_known and leaves:
                mine[1:] = (
                    torch.stack([leaf.to(transport.device, torch.float64) for _, leaf in leaves]).flatten().tolist()
                )
        told = all_gather(transport, mine)
        if any(row[0] == 2.0 for row in told):
            return shared_outputs(outputs, self._pipeline.context)
        row = next(row for row in told if row[0])
        numbers = torch.tensor(row[1:], device=transport.device).view(many, microbatches)
        return tree_unflatten([*numbers], spec)


def _without_loss(result: Any) -> Any:
    """The result without the loss, which the training step itself tells all ranks."""
    return result if result is None else {name: each for name, each in result.items() if name != "loss"}


def _sum(values: Tensor, multipliers: Sequence[float]) -> Tensor:
    """The sum of a number of each microbatch, multiplied; those that count nothing may be nan."""
    factors = torch.tensor(multipliers, dtype=torch.float64, device=values.device)
    return torch.where(factors == 0, 0.0, values.double() * factors).sum().to(values.dtype)
