"""The module that `from_module` cut. Scripts keep it beside the Pipeline, so stages have its modes, and state dicts of
a Pipeline its names, whether or not torch.compile has wrapped it. Must not contain: how it is cut, and checkpoints.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Container, Iterable, Mapping, MutableMapping
from typing import Any
from weakref import WeakKeyDictionary, WeakSet, ref

from torch import nn

from pipeflow.core.errors import UsageError
from pipeflow.engine.stages.stage import ModuleStage

COMPILED = "_orig_mod"  # the attribute in which torch.compile keeps the module that it wrapped
WRAPPERS = (COMPILED, "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "module")
"""Attributes in which wrappers keep the module that they wrap; `module` only at the start of a name."""


def plain_name(name: str) -> str:
    """The name in the original module, without the prefixes that torch.compile adds.

    >>> plain_name("_orig_mod.block3._orig_mod.weight")
    'block3.weight'
    """
    return name.replace(f"{COMPILED}.", "")


def unwrapped_name(name: str) -> str:
    """The name of a tensor or module without those of wrappers, torch's and of other engines.

    >>> unwrapped_name("module._fsdp_wrapped_module.layers.0._orig_mod.weight")
    'layers.0.weight'
    """
    steps = [step for step in name.split(".") if step not in WRAPPERS[:-1]]
    while steps and steps[0] == WRAPPERS[-1]:
        del steps[0]
    return ".".join(steps)


def uncompiled(module: nn.Module) -> nn.Module:
    """The module that torch.compile wrapped, or `module` itself if it is not wrapped."""
    inner = module._modules.get(COMPILED)
    return module if inner is None else inner


def root_of(module: nn.Module) -> nn.Module:
    """The module whose forward a stage runs: a copy of the module that was cut, or else the stage, not compiled."""
    inner = uncompiled(module)
    return inner.root if isinstance(inner, ModuleStage) else inner


def name_in_module(name: str, prefix: str, cut: Collection[str]) -> str:
    """The name without the first prefix in `cut` that follows `prefix` in it.

    >>> name_in_module("model.chunks.1.layers.3.weight", "model", {"chunks.1."})
    'model.layers.3.weight'
    """
    start = f"{prefix}." if prefix else ""
    own = name.removeprefix(start)
    found = next((each for each in cut if own.startswith(each)), "")
    return start + own.removeprefix(found)


LOG = logging.getLogger("pipeflow")

CHANGED = (
    "%s of the module was changed after from_module, which has no effect: stages run copies of its layers, which share "
    "only the values of its parameters, of its buffers on a CPU, and its modes; change the module before from_module"
)
"""Warns of a change that a stage does not see."""

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class Original:
    """The module that was cut, as long as others hold it, and its copies in the stages.

    Args:
        module: the module.
        stages: the stages of this rank, on their device.
        tells: whether this rank warns.

    Attributes:
        others: names of attributes that are those of a library, which it may change.
    """

    others: Container[str] = ()

    def __init__(self, module: nn.Module, stages: Iterable[nn.Module], *, tells: bool) -> None:
        self._module = ref(module)
        self._stages = [each for each in stages if isinstance(each, ModuleStage)]
        self._modes = _modes(module)
        self._contents = self._contents_of(module)
        self._trains = False
        self._tells = tells

    def follow(self, *, training: bool) -> None:
        """Before a step: gives the stages the modes that were changed in the module since the last look, and warns of
        other changes. In training, it looks only in a first step, and if the whole module's mode was changed.
        """
        module = self._module()
        if module is None or (training and self._trains and module.training is self._modes[""]):
            return
        self._trains = training
        self.give_modes()
        if self._tells and (change := self._change(module)):
            LOG.warning(CHANGED, change)
            self._tells = False

    def give_modes(self) -> None:
        """Gives the stages the modes that were changed in the module since the last look."""
        module = self._module()
        if module is not None:
            modes = _modes(module)
            self._give({name: mode for name, mode in modes.items() if mode is not self._modes.get(name)})
            self._modes = modes

    def train(self, *, mode: bool) -> None:
        """Sets the mode of the module, and gives the stages the modes that it has then."""
        module = self._module()
        if module is not None:
            module.train(mode)
            self._modes = _modes(module)
            self._give(self._modes)

    def _give(self, modes: dict[str, bool]) -> None:
        for stage in self._stages:
            if "" in modes:
                stage.training = modes[""]
            for name, each in stage.root.named_modules() if modes else ():
                each.training = modes.get(name, each.training)

    def _change(self, module: nn.Module) -> str | None:
        """What was changed beside modes, and where; None if nothing was."""
        for name, content in self._contents_of(module).items():
            before = self._contents.get(name, {})
            different = [key for key in {**before, **content} if before.get(key) != content.get(key)]
            different = [key for key in different if key not in self.others]
            if different:
                return f"{name}.{different[0]}" if name else different[0]
        return None

    def _contents_of(self, module: nn.Module) -> dict[str, dict[str, Any]]:
        """For each module within: its hooks, buffers, parameters and children, and attributes that are numbers or
        texts. Parameters of other ranks, which may be freed, are left out.
        """
        shared = {id(each) for stage in self._stages for each in (*stage.parameters(), *stage.root.buffers())}
        found: dict[str, dict[str, Any]] = {}
        for name, each in module.named_modules():
            own = vars(each)
            content: dict[str, Any] = {hooks: tuple(own[hooks]) for hooks in _HOOKS}
            content |= {key: _Same(child) for key, child in own["_modules"].items()}
            content |= {key: _Same(tensor) for key, tensor in own["_parameters"].items() if id(tensor) in shared}
            for key, buffer in own["_buffers"].items():
                content[key] = _Same(buffer), None if buffer is None or id(buffer) in shared else buffer._version
            content |= {key: value for key, value in own.items() if isinstance(value, int | float | str)}
            del content["training"]
            found[name] = content
        return found


class _Same:
    """Equal for the same object, which it does not keep alive."""

    def __init__(self, value: object) -> None:
        self._ref = None if value is None else ref(value)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Same) or self._ref is None or other._ref is None:
            return isinstance(other, _Same) and self._ref is other._ref
        mine = self._ref()
        return mine is not None and mine is other._ref()

    __hash__ = None  # type: ignore[assignment]  # it is only compared


def _modes(module: nn.Module) -> dict[str, bool]:
    return {name: each.training for name, each in module.named_modules()}


PART = (
    "state_dict() has only the weights of rank %d's stages: save_checkpoint saves those of all ranks, and "
    "save_safetensors writes them into one folder"
)

_WARNED: WeakSet[nn.Module] = WeakSet()  # once is enough
_GIVEN: WeakKeyDictionary[nn.Module, tuple[str, frozenset[str]]] = WeakKeyDictionary()  # prefix and entries of a load


def cut_chunks(chunks: nn.ModuleList) -> dict[str, ModuleStage]:
    """The chunks that were cut from a module, by their prefixes."""
    return {f"chunks.{index}.": chunk for index, chunk in enumerate(chunks) if isinstance(chunk, ModuleStage)}


def add_hooks(model: Any) -> None:
    """Makes the state dicts of a Pipeline those of this file."""
    model.register_state_dict_pre_hook(_confirm)
    model.register_state_dict_post_hook(rename_saved)
    model.register_load_state_dict_pre_hook(_confirm)
    model.register_load_state_dict_pre_hook(rename_loaded)
    model.register_load_state_dict_post_hook(_leave_out_added)


def _confirm(model: Any, *_: object) -> None:
    """Waits until the last step of the optimizer is confirmed, which may undo it. A hook of `nn.Module.state_dict` and
    `load_state_dict`.
    """
    model.runner.confirmation.confirm()


def rename_saved(model: Any, state: MutableMapping[str, Any], prefix: str, _: Mapping[str, Any]) -> None:
    """Gives the entries of a state dict the names in the module. A hook of `nn.Module.state_dict`."""
    context = model.context
    if context.pipeline_size * context.tensor.size > 1 and model not in _WARNED:
        _WARNED.add(model)
        LOG.warning(PART, context.rank)
    if cut := cut_chunks(model.chunks):
        for name in [each for each in state if each.startswith(prefix)]:
            state[name_in_module(name, prefix.removesuffix("."), cut)] = state.pop(name)


def rename_loaded(model: Any, state: MutableMapping[str, Any], prefix: str, *_: object) -> None:
    """Finds the entries of the stages under their names in the module, and leaves out those of other stages. A hook of
    `nn.Module.load_state_dict`. Raises UsageError for a whole weight of which this tensor rank has a part.
    """
    taken: set[str] = set()
    _rename_versions(model, state, prefix)
    for cut, chunk in cut_chunks(model.chunks).items():
        for name, own in chunk.state_dict().items():
            if prefix + name in state:
                state[prefix + cut + name] = state[prefix + name]
                taken.add(prefix + name)
                _require_shape(model, name, own, state[prefix + name])
    for name in taken.union(prefix + name for name in model.names_in_module):
        state.pop(name, None)
    _GIVEN[model] = prefix, frozenset(state)


def _rename_versions(model: Any, state: Any, prefix: str) -> None:
    """Gives the modules of the stages the versions that the module's had when they were saved: by these, modules change
    entries of older versions when they load.
    """
    versions = getattr(state, "_metadata", None) or {}
    for cut, chunk in cut_chunks(model.chunks).items():
        for name, _ in chunk.named_modules():
            if prefix + name in versions:
                versions.setdefault(f"{prefix}{cut}{name}".removesuffix("."), versions[prefix + name])


def _leave_out_added(model: Any, keys: Any) -> None:
    """Takes back the complaints about entries that nobody passed: modules of other stages, whose entries were left out,
    add them as if they loaded an older version. A hook of `nn.Module.load_state_dict`.
    """
    prefix, given = _GIVEN.pop(model)
    for name in [each for each in keys.unexpected_keys if each.startswith(f"{prefix}chunks.") and each not in given]:
        keys.unexpected_keys.remove(name)


def _require_shape(model: Any, name: str, own: Any, whole: Any) -> None:
    shapes = [tuple(getattr(each, "shape", ())) for each in (own, whole)]
    if model.context.tensor.size > 1 and shapes[0] != shapes[1]:
        raise UsageError(
            f"{name} is split over the tensor ranks, so this rank has a part of shape {shapes[0]}, not {shapes[1]}: "
            "load_state_dict does not split weights; save the module with safetensors, and use load_safetensors"
        )
