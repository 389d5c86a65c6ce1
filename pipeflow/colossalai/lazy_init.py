"""ColossalAI's `colossalai.lazy`: models whose parameters are made when it is known which rank owns them."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from threading import RLock, get_ident
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils.weak import WeakIdKeyDictionary

from pipeflow.adapters.huggingface.skeleton import Blueprint
from pipeflow.adapters.huggingface.weights import fill, make_owned
from pipeflow.core.errors import UsageError
from pipeflow.engine.parallel.transport.agreement import all_gather_object
from pipeflow.engine.runtime.pipeline import Pipeline
from pipeflow.training.layers import drawing_from


def copy_of_lazy(module: nn.Module) -> nn.Module:
    """A copy of the module if it has parameters on the meta device, where a copy takes no memory; else the module."""
    return copy.deepcopy(module) if any(each.is_meta for each in module.parameters()) else module


def fill_owned(made: Pipeline, module: nn.Module) -> None:
    """Makes this rank's parameters on the meta device, with initial values. All ranks call it together.

    Args:
        made: the Pipeline.
        module: the whole module before it was cut and split.

    Raises UsageError as `initial_values` does.
    """
    start = "" if made.cut else "chunks.0."  # a Pipeline of one whole module
    meta = [name.removeprefix(start) for name, each in made.named_parameters() if each.is_meta]
    context = made.context
    with context.alarm.raised_everywhere():
        context.alarm.expect_slow()
        everyone: list[Any] = all_gather_object(context.world, (bool(meta), torch.initial_seed()))
        if any(has for has, _ in everyone):
            make_owned(made)
            fill(made, initial_values(module, meta, everyone[0][1]))
            made.gradients.prepare()


def initial_values(module: nn.Module, names: Collection[str], seed: int) -> dict[str, Tensor]:
    """Initial values of the parameters `names`, which depend only on `seed` and these names: for a transformers model
    those of its class, for other modules those of their methods `reset_parameters`.

    Raises UsageError for a module without that method that has one of these parameters itself.
    """
    values: dict[str, Tensor] = {}
    for prefix, model in _models_of_transformers(module):
        inner = [name.removeprefix(prefix) for name in names if name.startswith(prefix)]
        dtype = next(model.parameters()).dtype
        made = Blueprint(type(model), model.config, dtype).initial(inner, seed)
        values |= {prefix + name: value for name, value in made.items()}
    for path in dict.fromkeys(name.rpartition(".")[0] for name in names if name not in values):
        start = f"{path}." if path else ""
        with drawing_from(f"{seed}/{path}"):
            found = _reset(module.get_submodule(path), path)
        values |= {start + name: value for name, value in found.items() if start + name in names}
    return values


def _models_of_transformers(module: nn.Module, prefix: str = "") -> list[tuple[str, Any]]:
    """The outermost ones, with the beginnings of their parameters' names."""
    library: Any = sys.modules.get("transformers")
    if library is not None and isinstance(module, library.PreTrainedModel):
        return [(prefix, module)]
    children = module.named_children()
    return [found for name, child in children for found in _models_of_transformers(child, f"{prefix}{name}.")]


def _reset(module: nn.Module, path: str) -> dict[str, Tensor]:
    """The values that the module's own parameters get."""
    reset = getattr(type(module), "reset_parameters", None) or getattr(type(module), "_reset_parameters", None)
    if reset is None:
        raise UsageError(
            f"{type(module).__name__} ({path or 'the model'}) has parameters of its own but no reset_parameters(): add "
            "that method, which sets their initial values, or make the model without LazyInitContext"
        )
    made = copy.deepcopy(module).to_empty(device="cpu")
    with torch.no_grad():
        reset(made)
    return {name: each.detach() for name, each in made.named_parameters(recurse=False)}


class OfThisThread(AbstractContextManager[Any]):
    """Inside the `with` block, a hook of torch is called for what this thread registers in modules. One thread at a
    time has one, since all threads share torch's hooks.
    """

    _one_at_a_time = RLock()

    def __enter__(self) -> Self:
        self._one_at_a_time.acquire()
        thread = get_ident()

        def hook(*arguments: Any) -> Any:
            return self._registered(*arguments) if get_ident() == thread else None

        self._handle = self._register(hook)
        return self

    def __exit__(self, *error: object) -> None:
        self._handle.remove()
        self._one_at_a_time.release()

    def _register(self, hook: Callable[..., Any]) -> Any:
        """Registers the hook: here for parameters."""
        return register_module_parameter_registration_hook(hook)

    def _registered(self, module: nn.Module, name: str, value: Any) -> Any:
        """Called for what is registered as `name`. Returns what takes its place, or None."""
        raise NotImplementedError


class LazyInitContext(OfThisThread):
    """Inside the `with` block, every parameter that a module registers goes to the meta device, which has no memory;
    buffers are real. `booster.boost` then makes the parameters that a rank owns, with initial values as in
    `initial_values`. A parameter that several modules share stays one parameter.

    Raises UsageError inside the block if weights are loaded into a model, as by `from_pretrained`: they would be lost.
    """

    def __enter__(self) -> Self:
        self._made = WeakIdKeyDictionary()  # parameters on the meta device, while those that they replace live
        self._ours = WeakIdKeyDictionary()  # all of them
        return super().__enter__()

    def _registered(self, module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        if parameter is None or parameter.is_meta:
            return None
        if (before := module._parameters.get(name)) is not None and before.is_meta and before not in self._ours:
            raise UsageError(
                f"LazyInitContext drops values, and {type(module).__name__} gets {name!r} with values, as by "
                "from_pretrained: make the model from its configuration, and load the weights with booster.load_model"
            )
        if parameter not in self._made:
            made = nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
            vars(made).update(vars(parameter))
            self._made[parameter] = made
            self._ours[made] = True
        found: nn.Parameter = self._made[parameter]
        return found

    @staticmethod
    def materialize(module: nn.Module, verbose: bool = False) -> nn.Module:
        """Makes all parameters of the module on the CPU, with initial values from torch's seed. Returns the module.

        Raises UsageError as `initial_values` does.
        """
        known: dict[int, nn.Parameter] = {}
        meta = [name for name, each in module.named_parameters() if each.is_meta]
        values = initial_values(module, meta, torch.initial_seed())
        for name, parameter in list(module.named_parameters(remove_duplicate=False)):
            if parameter.is_meta:
                if id(parameter) not in known:
                    known[id(parameter)] = nn.Parameter(values[name], parameter.requires_grad)
                owner: Any = module.get_submodule(name.rpartition(".")[0])
                owner._parameters[name.rpartition(".")[2]] = known[id(parameter)]
        return module
