"""LazyInitContext: makes modules with parameters on the meta device."""

from __future__ import annotations

from contextlib import AbstractContextManager
from threading import RLock, get_ident
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils.weak import WeakIdKeyDictionary

from pipeflow.colossalai.lazy.values import initial_values
from pipeflow.core.errors import UsageError

_ONE_THREAD = RLock()  # all threads share torch's hooks


class LazyInitContext(AbstractContextManager["LazyInitContext"]):
    """Inside the `with` block, every parameter that a module registers goes to the meta device, which has no memory;
    buffers are real. `booster.boost` then makes the parameters that a rank owns, with initial values as in
    `initial_values`. A parameter that several modules share stays one parameter.

    Raises UsageError inside the block if weights are loaded into a model, as by `from_pretrained`: they would be lost.
    """

    def __enter__(self) -> LazyInitContext:
        _ONE_THREAD.acquire()
        self._thread = get_ident()
        self._made = WeakIdKeyDictionary()  # parameters on the meta device, while those that they replace live
        self._ours = WeakIdKeyDictionary()  # all of them
        self._handle = register_module_parameter_registration_hook(self._emptied)  # type: ignore[arg-type]  # what it returns counts
        return self

    def __exit__(self, *_: object) -> None:
        self._handle.remove()
        _ONE_THREAD.release()

    def _emptied(self, module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        if parameter is None or parameter.is_meta or get_ident() != self._thread:
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
