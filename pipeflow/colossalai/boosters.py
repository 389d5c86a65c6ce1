"""ColossalAI's Booster, which trains, saves and loads. Weights are files of Hugging Face or of torch.save, written
whole or not at all; optimizers are pipeflow's checkpoints.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from pipeflow.adapters.libraries import needed
from pipeflow.colossalai.boosted_models import BoostedModel, BoostedOptimizer, Criterion, samples_in
from pipeflow.colossalai.plugins import HybridParallelPlugin, TorchDDPPlugin
from pipeflow.core.errors import UsageError
from pipeflow.core.files import replacing
from pipeflow.engine.parallel.transport.agreement import all_gather
from pipeflow.engine.runtime.pipeline import execute_pipeline
from pipeflow.training.checkpoint.manifest import find
from pipeflow.training.checkpoint.safetensors import Rename, load_safetensors, save_safetensors, saved_parts
from pipeflow.training.checkpoint.save import save_checkpoint
from pipeflow.training.checkpoint.task import Task
from pipeflow.training.checkpoint.tensor_files import SINGLE, TensorFiles, parts_folder

StrPath = str | os.PathLike[str]


def boosted_model(model: nn.Module) -> BoostedModel:
    """Returns the model. Raises UsageError if it is not boosted."""
    if not isinstance(model, BoostedModel):
        raise UsageError(f"this needs the model that boost returned, got {type(model).__name__}")
    return model


def boosted_optimizer(optimizer: Optimizer) -> BoostedOptimizer:
    """Returns the optimizer. Raises UsageError if it is not boosted."""
    if not isinstance(optimizer, BoostedOptimizer):
        raise UsageError(f"this needs the optimizer that boost returned, got {type(optimizer).__name__}")
    return optimizer


class Booster:
    """Trains, saves and loads a model as its plugin says. All ranks make the same calls, and share the files.

    Args:
        device: must be None; the launch chooses the device.
        mixed_precision: "fp16" or "bf16"; only without a plugin or for a TorchDDPPlugin. By default the model's own
            dtype.
        plugin: a HybridParallelPlugin; by default a TorchDDPPlugin, which has only replicas.

    Raises UsageError for another plugin, for a device, and for a precision besides another plugin.
    """

    def __init__(
        self,
        device: str | None = None,
        mixed_precision: Literal["fp16", "bf16"] | None = None,
        plugin: HybridParallelPlugin | None = None,
    ) -> None:
        if device or (mixed_precision and not isinstance(plugin, TorchDDPPlugin | None)):
            raise UsageError("remove device, since the launch chooses it, and pass the precision to the plugin")
        if plugin is None or mixed_precision:
            plugin = TorchDDPPlugin(precision=mixed_precision or "fp32")
        if not isinstance(plugin, HybridParallelPlugin):
            raise UsageError(f"plugin must be a HybridParallelPlugin, got {type(plugin).__name__}")
        self.plugin = plugin

    def boost(
        self,
        model: nn.Module,
        optimizer: Optimizer | None = None,
        criterion: Criterion | None = None,
        dataloader: Any = None,
        lr_scheduler: Any = None,
    ) -> tuple[Any, Any, Any, Any, Any]:
        """Returns its arguments ready for training: the model as a BoostedModel, the optimizer as a BoostedOptimizer,
        the others unchanged. The model must be the same on every rank, and the optimizer must be made from all of its
        parameters.

        Raises UsageError if the model is not a module or was boosted before.
        """
        if not isinstance(model, nn.Module) or isinstance(model, BoostedModel):
            raise UsageError(f"boost takes an nn.Module that is not boosted yet, got {type(model).__name__}")
        made = BoostedModel(model, self.plugin)
        made.criterion = criterion
        return made, optimizer and BoostedOptimizer(optimizer, made), criterion, dataloader, lr_scheduler

    def execute_pipeline(
        self,
        data_iter: Iterator[Any],
        model: nn.Module,
        criterion: Criterion | None = None,
        optimizer: Optimizer | None = None,
        return_loss: bool = True,
        return_outputs: bool = False,
    ) -> dict[str, Any]:
        """Runs the next batch of `data_iter`; under torch.no_grad() it computes no gradients. Returns a dict with
        "loss", the mean loss over all replicas, and "outputs". Both are None on ranks without the last stage, and if
        they are not asked for.

        If the model computes the loss from labels itself, microbatches are weighted by their number of labels other
        than -100; otherwise by their number of samples.

        Args:
            data_iter: iterator of batches. A batch is a dict of the forward's arguments, a tuple of all of them, or the
                first one.
            model: the model that `boost` returned.
            criterion: `criterion(outputs, inputs)` returns a microbatch's mean loss from the model's output and the
                whole microbatch; by default the one passed to `boost`.
            optimizer: the optimizer that `boost` returned; needed for training.
            return_loss: return the loss.
            return_outputs: return the outputs.

        Raises UsageError if the model or optimizer is not boosted, for an empty iterator, and as
        `pipeflow.execute_pipeline` does.
        """
        boosted, trains = boosted_model(model), torch.is_grad_enabled()
        if trains and not isinstance(optimizer, BoostedOptimizer):
            raise UsageError(
                "training needs the optimizer that boost returned: pass it, or evaluate under torch.no_grad()"
            )
        if (chosen := boosted.criterion if criterion is None else criterion) is None:
            raise UsageError("there is no criterion: pass one to execute_pipeline or to boost")
        batch = next(data_iter, None) if isinstance(data_iter, Iterator) else None
        if batch is None:
            raise UsageError("data_iter has no batch left: make a new one, iter(dataloader), for every epoch")
        boosted.prepare(batch)
        schedule = self.plugin.schedule(samples_in(batch))
        boosted.pipeline.runner.criterion = chosen
        output = execute_pipeline(
            iter([batch]),
            boosted.pipeline,
            forward_only=not trains,
            return_outputs=return_outputs,
            reduce=boosted.reduces,
            schedule=schedule,
        )
        outputs = boosted.whole_outputs(output.outputs, batch, schedule)
        return {"loss": output.loss if return_loss else None, "outputs": outputs}

    def backward(self, loss: Tensor, optimizer: Optimizer) -> None:
        """Computes the gradients of a loss of the called model. Raises UsageError with several pipeline ranks."""
        boosted_optimizer(optimizer).backward(loss)

    def no_sync(self, model: nn.Module | None = None, optimizer: Any = None) -> AbstractContextManager[None]:
        """Only accumulates gradients inside the `with` block; the next batch after it averages them over replicas."""
        return (boosted_optimizer(optimizer).model if model is None else boosted_model(model)).no_sync()

    def enable_lora(self, model: nn.Module, pretrained_dir: StrPath | None = None, lora_config: Any = None) -> Any:
        """Returns the model with LoRA adapters. Make the optimizer from its parameters, then boost both. All ranks get
        the same initial weights if they have the same seed.

        Args:
            model: the model.
            pretrained_dir: folder of trained adapters.
            lora_config: a peft.LoraConfig for new adapters.

        Raises UsageError if neither is given, or if peft is not installed.
        """
        if (pretrained_dir is None) == (lora_config is None):
            raise UsageError("enable_lora needs a lora_config for new adapters, or the pretrained_dir of trained ones")
        with needed("peft"):
            import peft
        if pretrained_dir is not None:
            return peft.PeftModel.from_pretrained(model, pretrained_dir, is_trainable=True)
        return peft.get_peft_model(model, lora_config)

    def save_model(
        self,
        model: nn.Module,
        checkpoint: StrPath,
        shard: bool = False,
        size_per_shard: int = 1024,
        use_safetensors: bool = False,
    ) -> None:
        """Saves all weights, whole, by their names in the module.

        Args:
            model: the model that `boost` returned.
            checkpoint: a folder with `shard`, else a file.
            shard: write several safetensors files with an index; otherwise one file.
            size_per_shard: maximum size of such a file in MiB.
            use_safetensors: write the single file in safetensors format, instead of a state_dict with torch.save.

        Raises UsageError if the package safetensors is not installed.
        """
        path, boosted = Path(checkpoint), boosted_model(model)
        if shard:
            save_safetensors(path, boosted.inner, shard_bytes=size_per_shard * 2**20)
            return
        with saved_parts(path, boosted.inner) as files:
            Task(self.plugin.context, lambda: _join(files, path, use_safetensors=use_safetensors)).wait()

    def load_model(self, model: nn.Module, checkpoint: StrPath) -> None:
        """Loads all weights from files that `save_model` wrote under any layout, or from a folder of safetensors files,
        such as one of transformers' save_pretrained.

        Raises UsageError, before anything is changed, if a weight is missing or has another shape.
        """
        path, boosted = Path(checkpoint), boosted_model(model)
        is_of_torch = not path.is_dir() and _is_of_torch(path)
        source, context = path, self.plugin.context
        with ExitStack() as parts:
            if is_of_torch:
                with context.alarm.raised_everywhere():
                    source = parts.enter_context(parts_folder(path, context))
                self._on_rank_0(lambda: _divide(path, source))
            with context.alarm.raised_everywhere():
                rename = _renames(source, boosted.names.values())
            load_safetensors(source, boosted.inner, rename)

    def save_optimizer(self, optimizer: Optimizer, checkpoint: StrPath, shard: bool = False) -> None:
        """Saves the optimizer's states, together with the weights, as pipeflow's checkpoint in the folder `checkpoint`;
        `shard` has no effect. Raises UsageError before the first batch, and as `pipeflow.save_checkpoint` does.
        """
        boosted = boosted_optimizer(optimizer)
        save_checkpoint(checkpoint, boosted.model.pipeline, boosted.inner)

    def load_optimizer(self, optimizer: Optimizer, checkpoint: StrPath) -> None:
        """Loads states and weights that `save_optimizer` wrote under any layout. With several pipeline ranks they are
        loaded when the first batch runs. Raises UsageError as `pipeflow.load_checkpoint` does.
        """
        path, boosted = Path(checkpoint), boosted_optimizer(optimizer)
        find(path)
        boosted.model.when_made(lambda _: boosted.load(path))

    def save_lr_scheduler(self, lr_scheduler: Any, checkpoint: StrPath) -> None:
        """Saves the state of rank 0's learning-rate scheduler to the file `checkpoint`."""
        state = lr_scheduler.state_dict()
        self._on_rank_0(lambda: write_file(Path(checkpoint), lambda file: torch.save(state, file)))

    def load_lr_scheduler(self, lr_scheduler: Any, checkpoint: StrPath) -> None:
        """Loads a file of `save_lr_scheduler`. Raises UsageError if it is missing or damaged."""
        lr_scheduler.load_state_dict(_read(Path(checkpoint)))

    def _on_rank_0(self, function: Callable[[], None]) -> None:
        """Calls `function` on rank 0, once all ranks have come here: another one may still read what it removes."""
        context = self.plugin.context
        with context.alarm.raised_everywhere():
            all_gather(context.world, [0.0])
            Task(context, function if context.rank == 0 else lambda: None).wait()


_METADATA = {"format": "pt"}  # transformers needs it


def _is_of_torch(path: Path) -> bool:
    """True if torch.save wrote the file. Raises UsageError if it does not exist."""
    if not path.is_file():
        raise UsageError(f"there is no file or folder {str(path)!r}")
    with path.open("rb") as file:
        return file.read(2) == b"PK"


def _read(path: Path) -> Any:
    """Reads plain values and tensors that torch.save wrote. Raises UsageError for anything else."""
    if not path.is_file():
        raise UsageError(f"there is no file {str(path)!r}")
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise UsageError(f"{path} was not written by torch.save, or is damaged: {error}") from error


def write_file(path: Path, write_to: Callable[[Path], object]) -> None:
    """Writes the file `path` with `write_to`. Raises UsageError if that fails, or if another kind of file is there."""
    try:
        if os.path.lexists(path) and not _is_saved(path):
            raise UsageError(f"{path} was not written by torch.save or safetensors: save to a new file")
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as temporary:
            write_to(temporary)
    except (OSError, RuntimeError) as error:
        raise UsageError(f"{path} could not be written: {error}") from error


def _is_saved(path: Path) -> bool:
    """True if a file begins as those of torch.save, or of safetensors, do."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        begin = file.read(9)
    return begin[:2] == b"PK" or begin[8:] == b"{"


def _join(parts: Sequence[Path], path: Path, *, use_safetensors: bool) -> None:
    """Joins the safetensors files `parts`, if there are any, into one file."""
    package = _package()
    whole: dict[str, Tensor] = {}
    for part in parts:
        whole |= package.load_file(part)
    if parts:
        write_file(
            path, lambda file: package.save_file(whole, file, _METADATA) if use_safetensors else torch.save(whole, file)
        )


def _divide(path: Path, parts: Path) -> None:
    """Converts a file of torch.save to a folder with a safetensors file. Raises UsageError if it is no state_dict."""
    package, whole = _package(), _read(path)
    if not isinstance(whole, dict) or not all(isinstance(each, Tensor) for each in whole.values()):
        raise UsageError(f"{path} is not a state_dict of tensors: pass a file that save_model wrote")
    package.save_file({name: each.clone().contiguous() for name, each in whole.items()}, parts / SINGLE, _METADATA)


def _renames(path: Path, tied: Iterable[Sequence[str]]) -> list[Rename]:
    """Renames for tied weights that the safetensors files have under one of their names alone, as transformers' have.

    Args:
        path: a file, or a folder.
        tied: all names of each weight.
    """
    there = TensorFiles(path).files
    found = [(names, [name for name in names if name in there]) for names in tied]
    return [Rename(name, known[0]) for names, known in found if known for name in names if name not in known]


def _package() -> Any:
    with needed("safetensors"):
        import safetensors.torch
    return safetensors.torch
