"""Accelerator: accelerate's, whose prepared model is a pipeline. Trackers, accumulation, loaders and files besides the
model's are accelerate's. Its model and its optimizer
are saved as a checkpoint of pipeflow, beside accelerate's files. Must not contain: the step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import accelerate
import torch
from accelerate.state import AcceleratorState
from accelerate.utils import DataLoaderConfiguration, ProfileKwargs
from accelerate.utils.constants import PROFILE_PATTERN_NAME
from torch import Tensor, nn
from torch.optim import Optimizer

from pipeflow.adapters.accelerate import utils
from pipeflow.adapters.accelerate.options import is_last_process, require_possible, share_place, sizes_of
from pipeflow.adapters.cut_model import PreparedModel, cut_settings
from pipeflow.adapters.libraries import instead, require_one_optimizer, require_unwrapped
from pipeflow.adapters.ranks import Operations, launched, numbers_of_all
from pipeflow.core.errors import UsageError
from pipeflow.engine.runtime.pipeline import Pipeline
from pipeflow.engine.runtime.step import LossOver
from pipeflow.engine.stages.blocks import Blocks, Cuts
from pipeflow.engine.tensor.random import share_default_state
from pipeflow.engine.torch_private.trees import tree_leaves, tree_map_only
from pipeflow.training.checkpoint.manifest import find
from pipeflow.training.checkpoint.safetensors import save_safetensors

STATE = "pipeflow"
"""The folder of a saved state that `pipeflow.load_checkpoint` reads."""


class Accelerator(Operations, accelerate.Accelerator):  # type: ignore[misc]  # accelerate has no types
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
        weigh, loss_over: as in `Pipeline`. For a loss of torch.nn.functional, `weigh` gets its tensors by their names,
            such as `{"target": labels}`. A model that computes its own loss has loss_over="microbatches" alone.
        head_slices, head: as in `Pipeline.from_module`.
        parallelism_config: sizes by accelerate's names, in place of `pipeline` and `tensor`.
        options: further arguments of accelerate's Accelerator.

    Raises UsageError for an option that is not possible with a pipeline, and for sizes that do not fit the processes.
    """

    _models: list[Any]
    _optimizers: list[Any]

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
        weigh: Callable[..., float] | None = None,
        loss_over: LossOver = "microbatches",
        head_slices: int | None = None,
        head: str | None = None,
        parallelism_config: Any = None,
        **options: Any,
    ) -> None:
        require_possible(options)
        device = "cpu" if options.get("cpu") else None
        self._context = launched(*sizes_of(parallelism_config, pipeline, tensor), device=device)
        self._model: PreparedModel | None = None
        self.flag_tensor: Tensor | None
        share_place(self._context)
        world = self._context.world
        with self._context.alarm.raised_everywhere():  # which opens channels after an error
            share_default_state(world.group(range(world.size)), self._context.device)
        options["dataloader_config"] = options.get("dataloader_config") or DataLoaderConfiguration()
        options["dataloader_config"].dispatch_batches = False
        super().__init__(**options)
        autocast = torch.bfloat16 if self.mixed_precision == "bf16" else None
        said = schedule, microbatches, schedule_options, cuts, blocks, weigh, loss_over, head_slices, head
        self._settings = cut_settings(*said, self._context, autocast, lambda: 1 / self.gradient_accumulation_steps)

    @property
    def _pipeline(self) -> Pipeline:
        return self._model_of("this").pipeline

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

    data_parallel_rank = process_index

    def prepare_model(self, model: nn.Module, device_placement: Any = None, evaluation_mode: bool = False) -> Any:
        """Returns the model as one that is cut at its first call. Raises UsageError for a second model."""
        if model is self._model:
            return model
        require_unwrapped(model)
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
        require_one_optimizer([*self._optimizers, optimizer], "the script")
        model.keep_groups(optimizer)
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
        return any(numbers_of_all(self._context, is_set))

    def unwrap_model(self, model: Any, *_: object, **__: object) -> Any:
        """Returns the module that was prepared; once it is cut, this rank's part of it."""
        return model.unwrap() if isinstance(model, PreparedModel) else model

    def save_model(
        self, model: Any, save_directory: Any, max_shard_size: int | str = "10GB", safe_serialization: bool = True
    ) -> None:
        """Saves the whole model's weights to safetensors files, under the names of the module that was prepared. All
        ranks call it together. `max_shard_size` and `safe_serialization` have no effect.
        """
        save_safetensors(save_directory, self._pipeline)

    def get_state_dict(self, model: Any, unwrap: bool = True) -> Any:
        """The weights by name, if this rank has the whole model. Raises UsageError otherwise."""
        if model is self._model and self._context.has_part:
            raise UsageError(
                "a rank of a pipeline has a part of the weights only: write those of all ranks with "
                "accelerator.save_model(model, folder), or with accelerator.save_state(folder)"
            )
        return super().get_state_dict(model, unwrap)

    def save_state(self, output_dir: str | None = None, safe_serialization: bool = True, **options: Any) -> Any:
        """Like accelerate's `save_state`: besides its files, the folder has model and optimizer as a checkpoint of
        pipeflow, which any layout can load. All ranks call it together. Raises UsageError before the model's first
        call.
        """
        model = self._model_of("save_state")
        _ = model.pipeline  # raises an error before anything is written
        with self._without_model():
            folder = super().save_state(output_dir, safe_serialization, **options)
        model.save(Path(folder, STATE), self._inner_optimizer(), step=self.step)
        return folder

    def load_state(self, input_dir: str | None = None, load_kwargs: Any = None, **options: Any) -> None:
        """Like accelerate's `load_state`, from a folder that `save_state` wrote under any layout. Model and optimizer
        are loaded when the model is first called. All ranks call it together.
        """
        model = self._model_of("load_state")
        folder = Path(self._newest() if input_dir is None else input_dir, STATE)
        found, optimizer = find(folder), self._inner_optimizer()
        with self._without_model(), instead(AcceleratorState._shared_state, process_index=0):  # whose files are loaded
            super().load_state(input_dir, load_kwargs, **options)
        model.load_options(found, optimizer)
        model.load(folder, lambda: optimizer)

    def _inner_optimizer(self) -> Any:
        """The optimizer that was prepared, or None."""
        return self._optimizers[0].optimizer if self._optimizers else None

    def _model_of(self, call: str) -> PreparedModel:
        if self._model is None:
            raise UsageError(f"this Accelerator has prepared no model: prepare the model before {call}")
        return self._model

    def _newest(self) -> str:
        """The folder from which accelerate loads by default: the newest whose model was saved, which comes last."""
        folders = [each for each in Path(self.project_dir or ".", "checkpoints").glob("*_*") if (each / STATE).is_dir()]
        if not folders or not self.project_configuration.automatic_checkpoint_naming:
            raise UsageError("load_state needs the folder of a saved state")
        return str(max(folders, key=lambda each: int(each.name.rpartition("_")[2])))

    def _without_model(self) -> AbstractContextManager[None]:
        """Inside the `with` block, accelerate knows neither model nor optimizer."""
        return instead(self.__dict__, _models=[], _optimizers=[])
