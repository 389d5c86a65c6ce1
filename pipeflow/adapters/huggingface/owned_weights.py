"""The parameters that a rank owns: allocated from the meta device, and filled with values. StoredWeights: the weights
in a folder, how they differ from a model's, and how a rank reads its own.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pipeflow.adapters.huggingface.keys import Source, names_of, sources_of
from pipeflow.core.errors import UsageError
from pipeflow.engine.parallel.context import Context
from pipeflow.engine.parallel.transport.agreement import all_gather_object, told_alike
from pipeflow.engine.runtime.devices import place
from pipeflow.engine.runtime.gradients.weights import replace_in
from pipeflow.engine.runtime.pipeline import Pipeline
from pipeflow.training.checkpoint.pieces import LocalTensor, local_tensors
from pipeflow.training.checkpoint.task import Task
from pipeflow.training.checkpoint.tensor_files import INDEX, SINGLE, TensorFiles, fill_pieces

LOG = logging.getLogger("pipeflow")
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def files_in(folder: Path) -> TensorFiles:
    """The tensors in a folder. Raises UsageError if there are none, or if they are pickled."""
    if not (folder / INDEX).is_file() and not (folder / SINGLE).is_file():
        for name in ("pytorch_model.bin", "pytorch_model.bin.index.json"):
            if (folder / name).is_file():
                raise UsageError(
                    f"{folder} has its weights in {name}, a pickle, which can run any code when it is read: convert "
                    "them to safetensors once, with AutoModel.from_pretrained(folder).save_pretrained(other)"
                )
    return TensorFiles(folder)


def dtype_in(files: TensorFiles) -> torch.dtype | None:
    """The dtype of the first floating-point tensor; None if there is none."""
    return next((found for name in files.files if (found := _DTYPES.get(files[name].get_dtype()))), None)


class StoredWeights:
    """The weights in a folder, seen as weights of a model.

    Args:
        skeleton: the model; only its names and shapes are used.
        folder: the folder's path, for errors.
        files: the tensors in the folder.
    """

    def __init__(self, skeleton: Any, folder: Path, files: TensorFiles) -> None:
        self._skeleton, self._folder, self._files = skeleton, folder, files
        self._shapes = {name: tuple(each.shape) for name, each in skeleton.state_dict(keep_vars=True).items()}
        self._names = names_of(skeleton)
        sources = sources_of(skeleton, files.files, lambda key: files[key].get_shape())
        there = {name for source in sources for name in source.names}
        self._sources = [source for source in sources if not self._is_second(source, there)]

    def _is_second(self, source: Source, there: Collection[str]) -> bool:
        """True if its tensor is also in the folder under its first name."""
        [first, *_] = self._names.get(source.names[0], source.names)
        return first not in source.names and first in there

    def new_names(self, new: Sequence[str] | None, context: Context) -> set[str]:
        """The names of all parameters that get initial values: those in `new`, or those of a head or a pooler that the
        folder lacks. All ranks call it together; each reads some of the files.

        Raises the same UsageError on every rank; it lists all missing and left-over tensors and wrong shapes.
        """
        wanted = self._named_new(new)
        there = {name for source in self._sources for name in source.names}
        lacking = self._lacking(there | wanted)
        heads = {name for name in lacking if new is None and self._is_of_head(name)}
        extra = [key for source in self._sources for key in self._extra(source)]
        left = [key for key in extra if self._is_of_other_head(key)]
        problems = [f"it lacks {name}" for name in sorted(lacking - heads)]
        problems += [f"its {key} is not in the model" for key in sorted(set(extra) - set(left))]
        mine = [found for source in self._share(context) for found in self._misshapen(source, wanted)]
        everyone: list[Any] = all_gather_object(context.world, mine)
        problems += sorted({problem for one in everyone for problem in one})
        with told_alike(context.world):
            if problems:
                raise UsageError(
                    f"{self._folder} does not fit {type(self._skeleton).__name__}: {'; '.join(problems)}. Pass "
                    "new=[...] to give the modules or parameters that it names initial values"
                )
        if context.rank == 0:
            self._warn(heads, left)
        return wanted | heads

    def _warn(self, heads: Collection[str], left: Collection[str]) -> None:
        if heads:
            LOG.warning("%s lacks %s: they get initial values and must be trained", self._folder, _listed(heads))
        if left:
            LOG.info("%s has %s, which the model lacks: they are ignored", self._folder, _listed(left))

    def _named_new(self, new: Sequence[str] | None) -> set[str]:
        """All names of the tensors that `new` names directly or by a module. Raises UsageError for an unknown name."""
        found: set[str] = set()
        for each in new or ():
            named = {name for name in self._shapes if f"{name}.".startswith(f"{each}.")}
            if not named:
                raise UsageError(f"new has {each!r}, which is not a module or parameter of the model")
            found |= named
        return {alias for name in found for alias in self._names[name]}

    def _lacking(self, there: Collection[str]) -> set[str]:
        """First names of the parameters that have no name in `there`."""
        ignored = _pattern(self._skeleton, "missing")
        parameters = dict(self._skeleton.named_parameters(remove_duplicate=False))
        return {
            same[0]
            for name, same in self._names.items()
            if name in parameters and not any(each in there or ignored(each) for each in same)
        }

    @property
    def _prefix(self) -> str:
        """The prefix of the base model's names; "" if the model is the base model."""
        prefix = str(self._skeleton.base_model_prefix)
        return f"{prefix}." if prefix and hasattr(self._skeleton, prefix) else ""

    def _is_of_head(self, name: str) -> bool:
        return not name.startswith(self._prefix) or "pooler" in name.split(".")

    def _extra(self, source: Source) -> list[str]:
        """The keys of a source if the model has none of its tensors."""
        ignored = _pattern(self._skeleton, "unexpected")
        if any(name in self._shapes for name in source.names):
            return []
        buffers = {name for name, _ in self._skeleton.named_buffers()}
        return [] if any(name in buffers or ignored(name) for name in source.names) else list(source.keys)

    def _is_of_other_head(self, key: str) -> bool:
        """True if a tensor that the model lacks belongs to another head."""
        if "pooler" in key.split("."):
            return True
        prefix = f"{self._skeleton.base_model_prefix}."
        return any(each.startswith(prefix) for each in self._files.files) and not key.startswith(prefix)

    def _share(self, context: Context) -> list[Source]:
        """The sources whose shapes this rank checks; those of one file stay together."""
        files = sorted(set(self._files.files.values()))
        mine = set(files[context.rank :: context.world_size])
        return [source for source in self._sources if self._files.files[source.keys[0]] in mine]

    def _misshapen(self, source: Source, new: Collection[str]) -> list[str]:
        names = [name for name in source.names if name in self._shapes and name not in new]
        if not names:
            return []
        if source.convert is None:
            made = {source.names[0]: tuple(self._files[source.keys[0]].get_shape())}
        else:
            empty = [torch.empty(tuple(self._files[key].get_shape()), device="meta") for key in source.keys]
            made = {name: tuple(tensor.shape) for name, tensor in source.convert(empty).items()}
        return [
            f"its {source.keys[0]} is {made[name]}, not {self._shapes[name]}"
            for name in names
            if made[name] != self._shapes[name]
        ]

    def read(self, model: Pipeline, names: Mapping[str, Sequence[str]] | None, new: Collection[str]) -> None:
        """Fills this rank's tensors, except the `new` ones. All ranks call it together, inside
        `alarm.raised_everywhere()`.

        Args:
            model: the Pipeline.
            names: the names in the skeleton of those of its tensors that are read; None for all, under their own names.
            new: names in the skeleton.
        """
        tensors = {each.name: each for each in local_tensors(model, model.context, None)}
        named = {own: [own] if names is None else names.get(own, ()) for own in tensors}
        owned = {name: tensors[own] for own, found in named.items() for name in found if name not in new}
        sources = [source for source in self._sources if any(name in owned for name in source.names)]
        by_file = self._files.by_file([source.keys[0] for source in sources])
        place = {key: index for index, key in enumerate(by_file)}
        sources.sort(key=lambda source: place[source.keys[0]])
        Task(model.context, lambda: self._fill(sources, owned)).wait()

    def _fill(self, sources: Sequence[Source], owned: dict[str, LocalTensor]) -> None:
        for source in sources:
            if source.convert is None:
                fill_pieces(owned[source.names[0]].pieces, self._files[source.keys[0]])
                continue
            made = source.convert([self._files[key][...] for key in source.keys])
            for name in source.names:
                if name in owned:
                    fill_pieces(owned[name].pieces, made[name])


def _pattern(skeleton: Any, what: str) -> Any:
    """A function that tells whether transformers ignores a name that is `what`: "missing" or "unexpected"."""
    patterns = list(getattr(skeleton, f"_keys_to_ignore_on_load_{what}", None) or ())
    if what == "unexpected":
        patterns += [r"rotary_emb\.inv_freq$", r"(^|\.)position_ids$"]
    expression = re.compile("|".join(f"(?:{pattern})" for pattern in patterns) or r"(?!)")
    return expression.search


def _listed(names: Collection[str]) -> str:
    listed = sorted(names)
    more = f" and {len(listed) - 8} more" if len(listed) > 8 else ""
    return ", ".join(listed[:8]) + more


def make_owned(model: Pipeline) -> None:
    """Replaces this rank's parameters on the meta device by zeros on its own device. A parameter that is registered in
    several places stays one parameter.
    """
    device = model.context.device
    replace_in(
        model,
        {
            id(each): nn.Parameter(torch.zeros(each.shape, dtype=each.dtype, device=device), each.requires_grad)
            for each in model.parameters()
            if each.is_meta
        },
    )
    place(model, device)


def fill(model: Pipeline, values: Mapping[str, Tensor]) -> None:
    """Fills this rank's parameters from whole `values`, by name; split parameters get their part."""
    for local in local_tensors(model, model.context, None):
        if local.name in values:
            fill_pieces(local.pieces, values[local.name])
