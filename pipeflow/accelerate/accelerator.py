"""Accelerator: accelerate's, whose prepared model is a pipeline. Trackers, accumulation, loaders and files besides the
model's are accelerate's. Must not contain: the step.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import DataLoaderConfiguration, ProfileKwargs
from accelerate.utils.constants import PROFILE_PATTERN_NAME
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves, tree_map_only

from pipeflow.accelerate import utils
from pipeflow.accelerate.model import PreparedModel, Settings
from pipeflow.accelerate.options import launched, require_possible, sizes_of
from pipeflow.accelerate.place import is_last_process, share_place
from pipeflow.accelerate.saving import SavingAccelerator
from pipeflow.core.errors import UsageError
from pipeflow.optim.clip import clip_grad_norm_
from pipeflow.optim.whole import WholeGroups
from pipeflow.parallel.transport.agreement import all_gather
from pipeflow.schedules.registry import make_schedule
from pipeflow.stages.blocks import Blocks, Cuts
from pipeflow.tensor.random import share_default_state


class Accelerator(SavingAccelerator):
    """accelerate's Accelerator, with a pipeline as model. All ranks run the same script. A "process" is a replica:
    `num_processes` is their number, and a loader gives each of them its own batches, of which the schedule makes
    microbatches.

    Args:
        pipeline: number of ranks in a pipeline; by default all processes form one.
        tensor: number of processes that share every layer.
        schedule: name of the schedule, as in `pipeflow.make_schedule`.
        microbatches: number of microbatches in a batch.
        schedule_options: further arguments of `pipeflow.make_schedule`, such as `{"chunks": 2}`.
        cuts, blocks: where the model is cut, as in `Pipeline.from_module`.
        parallelism_config: sizes by accelerate's names, in place of `pipeline` and `tensor`.
        options: further arguments of accelerate's Accelerator.

    Raises UsageError for an option that is not possible with a pipeline, and for sizes that do not fit the processes.
    """

    def __init__(
        self,
        pipeline: int | None = None,
        tensor: int | None = None,
        schedule: str = "1f1b",
        microbatches: int = 4,
        *,
        schedule_options: dict[str, Any] | None = None,
        cuts: Cuts = None,
        blocks: Blocks = None,
        parallelism_config: Any = None,
        **options: Any,
    ) -> None:
        require_possible(options)
        depth, width = sizes_of(parallelism_config, pipeline, tensor)
        self._context = launched(depth, width, cpu=bool(options.get("cpu")), config=parallelism_config)
        self._layout = parallelism_config
        self._model: PreparedModel | None = None
        self.flag_tensor: Tensor | None
        ranks = self._context.pipeline_size
        made = make_schedule(schedule, ranks=ranks, microbatches=microbatches, **(schedule_options or {}))
        share_place(self._context)
        world = self._context.world
        share_default_state(world.group(range(world.size)), self._context.device)
        options["dataloader_config"] = options.get("dataloader_config") or DataLoaderConfiguration()
        options["dataloader_config"].dispatch_batches = False
        super().__init__(**options)
        autocast = torch.bfloat16 if self.mixed_precision == "bf16" else None
        cut = {"cuts": cuts, "blocks": blocks, "autocast": autocast}
        self._settings = Settings(made, cut, lambda: 1 / self.gradient_accumulation_steps)

    @property
    def parallelism_config(self) -> Any:
        """None: what accelerate would do with one, the pipeline does."""
        return None

    @property
    def is_main_process(self) -> bool:
        """True on rank 0 of the world."""
        return self._context.rank == 0

    @property
    def is_last_process(self) -> bool:
        """True on the last rank of the world."""
        return is_last_process()

    @property
    def process_index(self) -> int:
        """The replica of this rank."""
        return self._context.data_rank

    @property
    def tensor_parallel_rank(self) -> int:
        """This rank among those that share its layers."""
        return self._context.tensor_rank

    @property
    def pipeline_parallel_rank(self) -> int:
        """This rank in its pipeline."""
        return self._context.pipeline_rank

    @property
    def data_parallel_rank(self) -> int:
        """The replica of this rank."""
        return self._context.data_rank

    def prepare_model(self, model: nn.Module, device_placement: Any = None, evaluation_mode: bool = False) -> Any:
        """Returns the model as one that is cut at its first call. Raises UsageError for a second model."""
        if model is self._model:
            return model
        if isinstance(model, DistributedDataParallel | FullyShardedDataParallel | FSDPModule):
            raise UsageError(
                f"the model is a {type(model).__name__}, but pipeline= and tensor= divide it here, and the pipeline "
                "averages the gradients of its replicas: pass the module itself"
            )
        if self._model is not None:
            raise UsageError(
                "an Accelerator of a pipeline prepares one model: pass the module that is trained, call further models "
                "without preparing them, and call accelerator.free_memory() before another training"
            )
        self._model = PreparedModel(model, self._settings, self._context)
        self._models.append(self._model)
        return self._model

    def prepare(self, *objects: Any, device_placement: Any = None) -> Any:
        """Like accelerate's `prepare`; the model may come after its optimizer."""
        for each in objects:
            if isinstance(each, nn.Module):
                self.prepare_model(each)
        return super().prepare(
            *(self._model if isinstance(each, nn.Module) else each for each in objects),
            device_placement=device_placement,
        )

    def prepare_optimizer(self, optimizer: Optimizer, device_placement: Any = None) -> Any:
        """Returns the optimizer as accelerate's; its groups keep this rank's parameters when the model is cut."""
        model = self._model
        if model is None:
            raise UsageError("prepare the optimizer together with its model, or after it")
        if self._optimizers:
            raise UsageError(
                "an Accelerator of a pipeline prepares one optimizer: give it the parameters of the others as groups, "
                'such as AdamW([{"params": first, "lr": 1e-3}, {"params": second, "lr": 1e-4}])'
            )
        groups = WholeGroups(optimizer, model.names)
        model.when_made(lambda made: groups.keep(made.named_parameters(remove_duplicate=False)))
        return super().prepare_optimizer(optimizer, device_placement=False)

    def backward(self, loss: Tensor, **options: Any) -> None:
        """Adds the gradients of the model's last step to `.grad`, divided by the accumulated batches. `loss` is that of
        the step, or computed from it. Raises UsageError for another loss.
        """
        step = None if self._model is None else self._model.step
        if step is not None and loss is step.loss:
            step.release()
            return
        if step is not None and isinstance(loss, Tensor) and loss.requires_grad and not step.is_released:
            super().backward(loss, **options)
            if step.is_released:
                return
        raise UsageError(
            "backward got a loss that is not that of the model's last call: pass output.loss, or what a loss of "
            "torch.nn.functional returned for the output, after a call in training mode; a pipeline computes the "
            "gradients of this loss only"
        )

    def clip_grad_norm_(self, parameters: object, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clips the whole model's gradient, whatever parameters are passed. Returns the norm before clipping."""
        return clip_grad_norm_(self._pipeline, max_norm, norm_type).float()

    def gather(self, tensor: Any) -> Any:
        """Concatenates the tensors of all replicas along dim 0."""
        return utils.gather(tensor)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Like `gather`, without the samples that fill up the last batch. Objects are gathered into one list."""
        if use_gather_object or not all(isinstance(leaf, Tensor) for leaf in tree_leaves(input_data)):
            return self._counted(utils.gather_object(input_data))
        return tree_map_only(Tensor, self._counted, self.gather(input_data))

    def _counted(self, whole: Any) -> Any:
        state = self.gradient_state
        return whole[: state.remainder] if state.end_of_dataloader and state.remainder > 0 else whole

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Adds up, averages, or takes the largest of the tensors of all replicas."""
        return utils.reduce(tensor, reduction, scale)

    def pad_across_processes(self, tensor: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> Any:
        """Pads tensors to the length of the longest among all replicas."""
        return utils.pad_across_processes(tensor, dim, pad_index, pad_first)

    def free_memory(self, *objects: Any) -> Any:
        """Like accelerate's `free_memory`: forgets what was prepared, after which another model can be prepared."""
        self._model = None
        return super().free_memory(*objects)

    @contextmanager
    def profile(self, profile_handler: Any = None) -> Iterator[Any]:
        """Profiles the `with` block, like accelerate's `profile`. Each rank writes its trace, `profile_<rank>.json`."""
        handler = profile_handler or self.profile_handler or ProfileKwargs()
        with super().profile(replace(handler, output_trace_dir=None)) as profiler:
            yield profiler
        if handler.output_trace_dir is not None:
            folder = Path(handler.output_trace_dir)
            folder.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(folder / PROFILE_PATTERN_NAME.format(suffix=self._context.rank)))
            self.wait_for_everyone()

    @contextmanager
    def join_uneven_inputs(self, joinables: Any, even_batches: bool | None = None) -> Iterator[None]:
        """Runs the `with` block. Raises UsageError for replicas with different numbers of batches."""
        if self.num_processes > 1 and not (self.even_batches if even_batches is None else even_batches):
            raise UsageError(
                "replicas of a pipeline make each step together, so all need the same number of batches: leave "
                "even_batches at True, and gather_for_metrics drops the samples that fill up the last one"
            )
        yield

    def check_trigger(self) -> bool:
        """Returns True on every rank if one has called `set_trigger` since the last check."""
        is_set = self.flag_tensor is not None and bool(self.flag_tensor.item())
        self.flag_tensor = None
        return any(told for [told] in all_gather(self._context.world, [float(is_set)]))

    def unwrap_model(self, model: Any, *_: object, **__: object) -> Any:
        """Returns the module that was prepared; once it is cut, this rank's part of it."""
        return model.unwrap() if isinstance(model, PreparedModel) else model
