"""PipelineStrategy: Lightning's Trainer for a pipeline. Loops, callbacks and schedulers are Lightning's; steps,
clipping and checkpoints are the pipeline's. Must not contain: the step.
"""

from __future__ import annotations

from typing import Any

from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor

from pipeflow.accelerate.model import Settings
from pipeflow.core.errors import UsageError
from pipeflow.lightning.metrics import among_replicas
from pipeflow.lightning.model import StepModel
from pipeflow.lightning.refusals import mixed_of, require_callbacks, require_one, require_possible, require_precision
from pipeflow.lightning.saving import SavingStrategy
from pipeflow.lightning.world import World
from pipeflow.optim.clip import clip_grad_norm_
from pipeflow.optim.whole import WholeGroups, names_of


class PipelineStrategy(World, SavingStrategy):
    """Trains an unmodified LightningModule in a pipeline, as in
    `Trainer(strategy=PipelineStrategy(schedule="1f1b", microbatches=8), devices=4)`. All ranks run the same script.

    Args:
        pipeline: number of ranks in a pipeline; by default all processes form one, divided by `tensor`.
        tensor: number of processes that share every layer.
        schedule: name of the schedule, as in `pipeflow.make_schedule`.
        microbatches: number of microbatches in a batch.
        schedule_options: further arguments of `pipeflow.make_schedule`, such as `{"chunks": 2}`.
        cuts, blocks: where the training step is cut, as in `Pipeline.from_module`.
        options: further arguments of Lightning's ParallelStrategy, such as `cluster_environment`.

    A training step is cut at the first batch, by which its stages are planned. Each microbatch runs `training_step`
    with a part of the batch; the loss is the mean over the batch and all replicas.

    Raises UsageError for what is not possible with a pipeline.
    """

    _prepared: StepModel | None = None
    _launcher_class = _SubprocessScriptLauncher  # the Trainer's

    @property
    def precision_plugin(self) -> Any:
        """The precision, with the pipeline's norm of gradients."""
        return super().precision_plugin

    @precision_plugin.setter
    def precision_plugin(self, plugin: Any) -> None:
        if plugin is not None:
            require_precision(plugin)
            plugin.clip_grad_by_norm = self._clip
        self._precision_plugin = plugin

    def _clip(self, optimizer: Any, max_norm: float) -> None:
        assert self._prepared is not None
        clip_grad_norm_(self._prepared.pipeline, max_norm)

    def setup(self, trainer: Any) -> None:
        """Prepares the module for its first batch. Raises UsageError for what is not possible with a pipeline."""
        module = self.lightning_module
        require_possible(module, self)
        self.accelerator.setup(trainer)
        self.model = module = self.precision_plugin.convert_module(module)
        if self._prepared is None or self._prepared.whole is not module:
            self._prepared = StepModel(module, self._settings(trainer), self._context, trainer)
        self._prepared.running.trainer = trainer
        among_replicas(module, self._context)  # each time: Lightning leaves metrics on the CPU when a run ends
        if trainer.state.fn == TrainerFn.FITTING:
            require_callbacks(trainer.callbacks)
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()

    def _settings(self, trainer: Any) -> Settings:
        options = {**self._cut, "autocast": mixed_of(self.precision_plugin)}
        return Settings(self._made_schedule(), options, lambda: 1 / trainer.accumulate_grad_batches)

    @property
    def is_distributed(self) -> bool:
        """True if loaders are to be divided among replicas."""
        return self._context.data_size > 1

    def setup_optimizers(self, trainer: Any) -> None:
        """Makes optimizer and schedulers; the optimizer's groups keep this rank's parameters when the module is cut."""
        try:
            super().setup_optimizers(trainer)
        except RuntimeError as error:
            if "multiple optimizers" not in str(error):
                raise
            require_one([None, None], type(self.lightning_module).__name__)
        require_one(self.optimizers, type(self.lightning_module).__name__)
        for optimizer in self.optimizers:
            self._keep_own(optimizer)

    def _keep_own(self, optimizer: Any) -> None:
        assert self._prepared is not None
        self._groups = groups = WholeGroups(optimizer, names_of(self.lightning_module))
        self._prepared.when_made(lambda made: groups.keep(made.named_parameters(remove_duplicate=False)))

    def model_to_device(self) -> None:
        """Does nothing: the module is cut before its parts leave the CPU."""

    def training_step(self, *arguments: Any) -> Any:
        """Runs forwards and backwards of a batch. The gradients wait for `backward`."""
        with self.precision_plugin.train_step_context():
            return self._run("training_step", *arguments)

    def validation_step(self, *arguments: Any) -> Any:
        """Evaluates a batch. Returns what the module's step returns, on every rank."""
        with self.precision_plugin.val_step_context():
            return self._run("validation_step", *arguments)

    def test_step(self, *arguments: Any) -> Any:
        """Evaluates a batch, like `validation_step`."""
        with self.precision_plugin.test_step_context():
            return self._run("test_step", *arguments)

    def predict_step(self, *arguments: Any) -> Any:
        """Evaluates a batch, like `validation_step`."""
        with self.precision_plugin.predict_step_context():
            return self._run("predict_step", *arguments)

    def _run(self, method: str, *arguments: Any) -> Any:
        assert self._prepared is not None
        return self._prepared.run(method, *arguments)

    def backward(self, closure_loss: Tensor, optimizer: Any, *arguments: Any, **options: Any) -> Tensor:
        """Adds the gradients to `.grad`. Raises UsageError for a loss that training_step did not return."""
        told: Tensor = super().backward(closure_loss, optimizer, *arguments, **options)
        step = None if self._prepared is None else self._prepared.step
        if step is None or not step.is_released:
            raise UsageError(
                f"{type(self.lightning_module).__name__}.backward differentiates another loss than training_step "
                "returned: a pipeline computes the gradients of this loss only, so return the whole loss from "
                "training_step, and call loss.backward() for it"
            )
        return told

    def teardown(self) -> None:
        """Ends a run. The module stays in its parts, so that others can follow."""
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()
