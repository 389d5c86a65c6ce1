"""Adapters, such as peft's LoRA: added to a model before its weights are loaded, and saved so that peft can read them.
Must not contain: training, which needs no special code.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from pipeflow.adapters.huggingface.keys import as_it_is
from pipeflow.adapters.huggingface.skeleton import ONE_AT_A_TIME
from pipeflow.adapters.libraries import needed
from pipeflow.core.errors import UsageError
from pipeflow.engine.parallel.transport.agreement import all_gather
from pipeflow.engine.runtime.gradients.weights import replace_in
from pipeflow.engine.runtime.pipeline import Pipeline
from pipeflow.training.checkpoint.pieces import local_tensors
from pipeflow.training.checkpoint.tensor_files import OutputTensor, TensorFiles, parts_together

LOADED = (
    "load the model that they adapt with pipeflow.huggingface.from_pretrained(its_folder, schedule, adapters=folder)"
)
"""Advice for a folder of adapters, for errors."""
_COPY, _ORIGINAL = ".modules_to_save.", ".original_module."


@dataclass(frozen=True)
class Adapted:
    """A skeleton with adapters.

    Attributes:
        root: peft's model around the skeleton. The adapters have values; the skeleton's parameters have none.
        weights: the names in the skeleton of each of its tensors, by the name in `root`.
        copies: the same for the copies that are trained in full (peft's `modules_to_save`) and that start from the
            skeleton's values.
    """

    root: Any
    weights: Mapping[str, list[str]]
    copies: Mapping[str, list[str]]


def add_adapters(skeleton: Any, adapters: Any, seed: int) -> Adapted:
    """Adds adapters to a skeleton, whose parameters they freeze.

    Args:
        skeleton: a transformers model with parameters on the meta device.
        adapters: a configuration of peft, such as peft.LoraConfig, for new adapters; or the folder of saved ones.
        seed: seed of torch's random numbers, from which new adapters are drawn as `peft.get_peft_model` does.

    Raises UsageError if peft is not installed, if it cannot add them, or if their values depend on the model's weights.
    """
    names: dict[int, list[str]] = defaultdict(list)
    for name, each in skeleton.state_dict(keep_vars=True).items():
        names[id(each)].append(name)
    with _stand_ins(skeleton), ONE_AT_A_TIME, torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        root = _with_peft(skeleton, adapters)
    tensors = root.state_dict(keep_vars=True)
    weights = {name: names[id(each)] for name, each in tensors.items() if id(each) in names}
    others = {name: each for name, each in root.named_parameters() if name not in weights}
    copies = {name: _copied(name, weights) for name, each in others.items() if each.isnan().any()}
    for name in copies:
        owner, _, own = name.rpartition(".")
        root.get_submodule(owner)._parameters[own] = nn.Parameter(others[name].detach().to("meta"))
    return Adapted(root, weights, copies)


def _with_peft(skeleton: Any, adapters: Any) -> Any:
    with needed("peft", who="adapters="):
        import peft
    is_folder = isinstance(adapters, str | os.PathLike)
    if not is_folder and not isinstance(adapters, peft.PeftConfig):
        raise UsageError(
            "adapters must be a configuration of peft, such as peft.LoraConfig(), or the folder of saved adapters, "
            f"got {adapters!r}"
        )
    if is_folder and not has_adapters(Path(adapters)):
        raise UsageError(f"{adapters} has no adapters: pass a folder with peft's adapter_config.json")
    try:
        if is_folder:
            return peft.PeftModel.from_pretrained(skeleton, str(adapters), is_trainable=True, torch_device="cpu")
        return peft.get_peft_model(skeleton, adapters)
    except (ValueError, RuntimeError, KeyError, NotImplementedError, TypeError) as error:
        raise UsageError(
            f"peft cannot add these adapters to a {type(skeleton).__name__} whose weights are not loaded yet: {error}"
        ) from error


def _copied(name: str, weights: Mapping[str, list[str]]) -> list[str]:
    """The names in the skeleton of the tensor that `name` is a copy of. Raises UsageError for another parameter."""
    before, _, after = name.partition(_COPY)
    found = weights.get(before + _ORIGINAL + after.partition(".")[2])
    if found is None:
        raise UsageError(
            f"the first values of {name} depend on the weights of the model, which are loaded later: use "
            "peft.LoraConfig(init_lora_weights=True, use_dora=False), or call peft.get_peft_model(module, config) on "
            "the whole module, and then pipeflow.Pipeline.from_module"
        )
    return found


@contextmanager
def _stand_ins(skeleton: nn.Module) -> Iterator[None]:
    """Inside the `with` block, parameters on the CPU, without memory, stand for those on the meta device, which are
    frozen afterwards if their stand-ins were. All their values are NaN, so that what is computed from them is found.
    peft moves adapters to the device of what they adapt.
    """
    originals = [each for each in skeleton.parameters() if each.is_meta]
    values = (torch.full((), torch.nan, dtype=each.dtype).expand(each.shape) for each in originals)
    made = [nn.Parameter(its, each.requires_grad) for its, each in zip(values, originals, strict=True)]
    replace_in(skeleton, {id(each): stand_in for each, stand_in in zip(originals, made, strict=True)})
    try:
        yield
    finally:
        for each, stand_in in zip(originals, made, strict=True):
            each.requires_grad_(stand_in.requires_grad)
        replace_in(skeleton, {id(stand_in): each for each, stand_in in zip(originals, made, strict=True)})


def has_adapters(folder: Path) -> bool:
    """Returns True if peft saved adapters in a folder."""
    return (folder / "adapter_config.json").is_file()


def is_adapted(root: object) -> bool:
    """True if a model has adapters of peft."""
    return hasattr(root, "peft_config") and hasattr(root, "base_model") and hasattr(root, "save_pretrained")


def save_adapters(model: Pipeline, root: Any, folder: Path) -> None:
    """Saves the adapters of all stages, without the adapted model, to a folder that peft reads. All ranks call it
    together, inside `alarm.raised_everywhere()`. Each writes its own adapters; then rank 0 reads them, and peft writes
    them as one file.
    """
    tensors = [each for each in local_tensors(model, model.context, None) if each.tensor.requires_grad]
    outputs = [OutputTensor(each, *as_it_is(each.name)) for each in tensors]
    with parts_together(folder / "adapters", outputs, model.context, shard_bytes=5 * 10**9) as parts:
        if model.context.rank == 0:
            files = [TensorFiles(Path(part.file)) for part in parts]
            state = {name: stored[name][...] for stored in files for name in stored.files}
            root.save_pretrained(folder, state_dict=state)
        all_gather(model.context.world, [0.0])
