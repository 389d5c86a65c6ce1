"""PipelineStrategy: Lightning's Trainer for a pipeline. Loops, callbacks and schedulers are Lightning's; steps,
clipping and checkpoints are the pipeline's. Must not contain: the step.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch.callbacks import BaseFinetuning, ModelPruning, StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor

from pipeflow.adapters.libraries import require_one_optimizer, require_unwrapped
from pipeflow.adapters.lightning.model import StepModel
from pipeflow.adapters.lightning.steps import among_replicas
from pipeflow.adapters.lightning.world import LightningWorld, autocast_of, packed, require_precision, unpacked
from pipeflow.adapters.ranks import clipped_norm
from pipeflow.core.errors import UsageError
from pipeflow.training.checkpoint.manifest import find
from pipeflow.training.optim.optimizer import names_of


class PipelineStrategy(LightningWorld, ParallelStrategy):  # type: ignore[misc]  # Lightning's types are not read
    """Trains an unmodified LightningModule in a pipeline, as in
    `Trainer(strategy=PipelineStrategy(schedule="1f1b", microbatches=8), devices=4)`. All ranks run the same script.

    Args:
        pipeline: number of ranks in a pipeline; by default all processes form one, divided by `tensor`.
        tensor: number of processes that share every layer.
        schedule: name of the schedule, as in `pipeflow.make_schedule`.
        microbatches: number of microbatches in a batch.
        schedule_options: further arguments of `pipeflow.make_schedule`, such as `{"chunks": 2}`.
        cuts, blocks: where the training step is cut, as in `Pipeline.from_module`.
        weigh: as in `Pipeline`; it gets a part of the batch.
        loss_over: as in `Pipeline`; a training step has "microbatches" alone.
        head_slices: as in `Pipeline`.
        head: the name of the head in the LightningModule, as in "model.lm_head".
        options: further arguments of Lightning's ParallelStrategy, such as `cluster_environment`.

    A training step is cut at the first batch, by which its stages are planned. Each microbatch runs `training_step`
    with a part of the batch; the loss is the mean over the batch and all replicas.

    A checkpoint is a folder that `pipeflow.load_checkpoint` reads under any layout, which has Lightning's checkpoint,
    without weights, among its values.

    Raises UsageError for what is not possible with a pipeline.
    """

    _prepared: StepModel | None = None
    _folder: Path | None = None  # from which is loaded
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
        clipped_norm(self._prepared.pipeline, max_norm)

    def setup(self, trainer: Any) -> None:
        """Prepares the module for its first batch. Raises UsageError for what is not possible with a pipeline."""
        module = self.lightning_module
        require_possible(module, self)
        self.accelerator.setup(trainer)
        self.model = module = self.precision_plugin.convert_module(module)
        if self._prepared is None or self._prepared.whole is not module:
            autocast = autocast_of(self.precision_plugin)
            settings = self._settings_for(self._context, autocast, lambda: 1 / trainer.accumulate_grad_batches)
            self._prepared = StepModel(module, settings, self._context, trainer)
        self._prepared.running.trainer = trainer
        among_replicas(module, self._context)  # each time: Lightning leaves metrics on the CPU when a run ends
        if trainer.state.fn == TrainerFn.FITTING:
            require_callbacks(trainer.callbacks)
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()

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
            require_one_optimizer([None, None], type(self.lightning_module).__name__)
        require_one_optimizer(self.optimizers, type(self.lightning_module).__name__)
        assert self._prepared is not None
        for optimizer in self.optimizers:  # in a second run, of parameters that the module has since it was cut
            self._prepared.keep_groups(optimizer, names_of(self.lightning_module))

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
        if self._prepared is None or not self._prepared.is_released:
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

    @property
    def _is_cut(self) -> bool:
        return self._prepared is not None and self._prepared.is_cut

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """True: weights are loaded into the module that setup prepares."""
        return True

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The weights, until the module is cut; then nothing, since all ranks save them together."""
        return {} if self._is_cut else super().lightning_module_state_dict()

    def optimizer_state(self, optimizer: Any) -> Any:
        """The states, until the module is cut; then nothing, since all ranks save them together."""
        return {} if self._is_cut else super().optimizer_state(optimizer)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Saves weights, optimizer and Lightning's checkpoint to rank 0's `filepath`, a folder; numbers in its name may
        differ between replicas. All ranks call it together. Before the first batch, it is a file of Lightning's own.
        """
        if not self._is_cut:
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        assert self._prepared is not None
        self._prepared.save(
            self.broadcast(filepath), self._optimizer, step=checkpoint["global_step"], extra=packed(checkpoint)
        )

    @property
    def _optimizer(self) -> Any:
        return self.optimizers[0] if self.optimizers else None

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> Any:
        """Lightning's checkpoint in a folder that `save_checkpoint` wrote under any layout, or a file of a run without
        a pipeline.
        """
        self._folder = None
        if not Path(checkpoint_path).is_dir():
            return super().load_checkpoint(checkpoint_path, weights_only)
        self._folder = find(Path(checkpoint_path))
        return unpacked(self._folder, weights_only)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Loads the weights, and in training also the optimizer's states, when the module is cut."""
        prepared, folder = self._prepared, self._folder
        assert prepared is not None
        if folder is None:
            whole = prepared.inner if self._is_cut else prepared.whole
            whole.load_state_dict(checkpoint["state_dict"], strict=strict)
            return
        prepared.load(folder, lambda: self._optimizer)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Loads the states of a run without a pipeline; others are loaded with the weights, after the groups' options,
        which callbacks may read before.
        """
        assert self._prepared is not None
        if self._folder is not None:
            self._prepared.load_options(self._folder, self._optimizer)
            return
        groups, states = self._prepared.groups, checkpoint["optimizer_states"]
        if self._is_cut and groups is not None:
            states = [groups.part_of(each) for each in states]
        super().load_optimizer_state_dict({**checkpoint, "optimizer_states": states})


def require_possible(module: Any, strategy: Any) -> None:
    """Raises UsageError for a LightningModule that a pipeline cannot train."""
    if not module.automatic_optimization:
        raise UsageError(
            f"{type(module).__name__} has automatic_optimization=False, but a pipeline runs the backwards within a "
            "step: set it to True, and return the loss from training_step; accumulate_grad_batches and "
            "gradient_clip_val are options of the Trainer"
        )
    require_unwrapped(module)
    if getattr(strategy, "_layer_sync", None) is not None:
        raise UsageError(
            "sync_batchnorm=True is not possible with a pipeline, where a BatchNorm sees one microbatch: remove it, "
            "or use GroupNorm or LayerNorm"
        )


def require_callbacks(callbacks: list[Any]) -> None:
    """Raises UsageError for a callback that needs the weights of the whole module while it trains."""
    for each in callbacks:
        name = type(each).__name__
        if isinstance(each, StochasticWeightAveraging | WeightAveraging):
            raise UsageError(
                f"{name} averages the whole module, of which a rank trains a part: keep the checkpoint of every epoch, "
                "ModelCheckpoint(save_top_k=-1), and average the weights that pipeflow.load_checkpoint loads from them"
            )
        if isinstance(each, BaseFinetuning):
            raise UsageError(
                f"{name} adds parameters to the optimizer during a run, but a pipeline trains those that it had at the "
                "first batch: set requires_grad in the module, and train a second module, loaded with "
                "pipeflow.load_checkpoint from the first one's checkpoint, in which more of them have it"
            )
        if isinstance(each, ModelPruning):
            raise UsageError(
                f"{name} prunes the whole module, of which a rank trains a part: prune a module that "
                "pipeflow.load_checkpoint loaded from the checkpoint of a run"
            )
