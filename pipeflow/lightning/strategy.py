"""PipelineStrategy: Lightning's Trainer for a pipeline. Loops, callbacks and schedulers are Lightning's; steps,
clipping and checkpoints are the pipeline's. Must not contain: the step.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from lightning.fabric.utilities.rank_zero import rank_zero_only as fabric_rank_zero_only
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch import Tensor

from pipeflow.accelerate.model import Settings
from pipeflow.core.errors import UsageError
from pipeflow.huggingface.training.replicas import gathered
from pipeflow.lightning.model import StepModel
from pipeflow.lightning.refusals import require_one, require_possible, require_precision
from pipeflow.lightning.saving import SavingStrategy
from pipeflow.optim.clip import clip_grad_norm_
from pipeflow.optim.whole import WholeGroups, names_of
from pipeflow.parallel.context import Context, context_if_launched
from pipeflow.parallel.launcher import launch
from pipeflow.parallel.transport.agreement import all_gather, all_gather_object
from pipeflow.schedules.registry import make_schedule
from pipeflow.stages.blocks import Blocks, Cuts


class PipelineStrategy(SavingStrategy):
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

    def __init__(
        self,
        pipeline: int | None = None,
        tensor: int = 1,
        schedule: str = "1f1b",
        microbatches: int = 4,
        *,
        schedule_options: dict[str, Any] | None = None,
        cuts: Cuts = None,
        blocks: Blocks = None,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self._sizes = pipeline, tensor
        self._schedule = schedule, {"microbatches": microbatches, **(schedule_options or {})}
        self._cut = {"cuts": cuts, "blocks": blocks}
        self._prepared: StepModel | None = None
        self.num_nodes = 1

    @property
    def is_distributed(self) -> bool:
        """True if loaders are to be divided among replicas."""
        return self._context.data_size > 1

    @property
    def _context(self) -> Context:
        context = context_if_launched()
        assert context is not None, "setup_environment launches it"
        return context

    @property
    def root_device(self) -> torch.device:
        """The device of this rank."""
        device: torch.device = self.parallel_devices[self.local_rank]
        return device

    @property
    def num_processes(self) -> int:
        """The number of processes on this machine."""
        return len(self.parallel_devices or ())

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Which part of the data this rank reads: that of its replica."""
        return {"num_replicas": self._context.data_size, "rank": self._context.data_rank}

    def set_world_ranks(self) -> None:
        """Tells Lightning this rank's place."""
        environment = self.cluster_environment
        environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
        environment.set_world_size(self.num_nodes * self.num_processes)
        rank_zero_only.rank = fabric_rank_zero_only.rank = self.global_rank

    def _configure_launcher(self) -> None:
        if not self.cluster_environment.creates_processes_externally:
            self._launcher = _SubprocessScriptLauncher(self.cluster_environment, self.num_processes, self.num_nodes)

    def setup_environment(self) -> None:
        """Connects the ranks, and gives torch's generator the state that it has on rank 0, so that ranks of a pipeline
        read the same batches.
        """
        super().setup_environment()
        self.set_world_ranks()
        context = context_if_launched() or self._launch()
        if context.world_size != self.world_size:
            raise UsageError(
                f"{context.world_size} processes are launched, but the Trainer has {self.world_size} devices: start as "
                "many processes as devices= times num_nodes= says"
            )
        torch.set_rng_state(torch.tensor(self.broadcast(torch.get_rng_state().tolist()), dtype=torch.uint8))

    def _launch(self) -> Context:
        environment = self.cluster_environment
        places = {"RANK": self.global_rank, "WORLD_SIZE": self.world_size, "LOCAL_RANK": self.local_rank}
        os.environ.update({name: str(place) for name, place in places.items()})
        os.environ.update(MASTER_ADDR=environment.main_address, MASTER_PORT=str(environment.main_port))
        return launch(*self._sizes, device=self.root_device)

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
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()

    def _settings(self, trainer: Any) -> Settings:
        name, options = self._schedule
        schedule = make_schedule(name, ranks=self._context.pipeline_size, **options)
        mixed = torch.bfloat16 if self.precision_plugin.precision == "bf16-mixed" else None
        return Settings(schedule, {**self._cut, "autocast": mixed}, lambda: 1 / trainer.accumulate_grad_batches)

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
        groups = WholeGroups(optimizer, names_of(self.lightning_module))
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

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """The mean, or sum, of a tensor over the replicas."""
        if not isinstance(tensor, Tensor):
            return tensor
        every = gathered(tensor[None], self._context)
        name = str(reduce_op).rpartition(".")[2].lower()
        if name in ("max", "min"):
            return getattr(every, f"a{name}")(0)
        return (
            every.sum(0) if name == "sum" else every.mean(0, dtype=None if every.is_floating_point() else torch.float)
        )

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """The tensors of all replicas, stacked."""
        every: Tensor = gathered(tensor[None], self._context)
        return every

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Whether all ranks, or any, decide so."""
        told = [bool(each) for [each] in all_gather(self._context.world, [float(decision)])]
        return min(told) if all else max(told)

    def barrier(self, name: str | None = None) -> None:
        """Waits until all ranks have called it."""
        context = context_if_launched()
        if context is not None:
            all_gather(context.world, [0.0])

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """The object of rank `src`, made of plain values."""
        context = context_if_launched()
        plain = os.fspath(obj) if isinstance(obj, os.PathLike) else obj
        return obj if context is None else all_gather_object(context.world, plain)[src]

    def teardown(self) -> None:
        """Ends a run. The module stays in its parts, so that others can follow."""
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()
