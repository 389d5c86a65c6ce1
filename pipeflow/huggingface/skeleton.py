"""Skeletons: models of transformers whose parameters are on the meta device, without memory, but whose buffers are
real, since checkpoints lack most of them; and first values of some of the parameters. Both come from the class's own
constructor. What must not live here: files, and stages.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from threading import RLock, get_ident
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from pipeflow.core.errors import UsageError
from pipeflow.huggingface.draws import SeededDraws

_ONE_AT_A_TIME = RLock()  # torch's hook, and what transformers replaces while it initialises, are of all threads


@dataclass(frozen=True)
class Blueprint:
    """A model that can be made, in whole or in part.

    Attributes:
        kind: its class.
        config: its configuration.
        dtype: torch's default while it is made: that of all its parameters, unless its class says another one.
    """

    kind: Any
    config: Any
    dtype: torch.dtype

    def skeleton(self) -> Any:
        """The model, in evaluation mode, with all parameters on the meta device.

        Raises UsageError where its class cannot make it.
        """
        model, _ = self._constructed(_Kept({}, {}, 0))
        self._widen(model)
        return model.eval()

    def initial(self, names: Collection[str], seed: int) -> dict[str, Tensor]:
        """First values of the parameters with these names, as the class's own constructor and `_init_weights` give
        them. What is drawn at random for a parameter depends on `seed` and its name alone.

        Raises UsageError for a parameter that the class makes in no place where it can be kept.
        """
        if not names:
            return {}
        first, order = self._constructed(_Kept({}, {}, 0))
        known = {id(parameter): name for name, parameter in first.named_parameters()}
        by_index = {index: known.get(id(parameter), "") for index, parameter in enumerate(order)}
        self._widen(first)
        dtypes = {index: first.get_parameter(name).dtype for index, name in by_index.items() if name in names}
        model, _ = self._constructed(_Kept(dtypes, by_index, seed))
        made = dict(model.named_parameters())
        if unmade := [name for name in names if made[name].is_meta]:
            raise UsageError(
                f"{self.kind.__name__} makes {unmade[0]} as a copy of another parameter, so a part of the model cannot "
                "be made without the rest: make a checkpoint of the whole model, and load that"
            )
        return {name: made[name].detach() for name in names}

    def _constructed(self, kept: _Kept) -> tuple[Any, list[nn.Parameter]]:
        with _ONE_AT_A_TIME, kept, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            default = torch.get_default_dtype()  # which another thread may change before
            torch.set_default_dtype(self.dtype)
            try:
                return self.kind(copy.deepcopy(self.config)), kept.order
            except Exception as error:
                raise UsageError(f"{self.kind.__name__} cannot be made of this configuration: {error}") from error
            finally:
                torch.set_default_dtype(default)

    def _widen(self, model: Any) -> None:
        """Gives those parameters float32 that models keep so, whatever the others are."""
        kept = set[str]()
        if self.dtype is torch.float16:
            kept |= set(getattr(model, "_keep_in_fp32_modules", None) or ())
        if self.dtype in (torch.float16, torch.bfloat16):
            kept |= set(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
        for name, parameter in model.named_parameters() if kept else ():
            if parameter.is_floating_point() and any(f".{each}." in f".{name}." for each in kept):
                parameter.data = parameter.data.float()


@dataclass
class _Kept:
    """While it is entered, the parameters that modules of this thread register go to the meta device, but for some.

    Attributes:
        dtypes: of those that are kept, by their number in the order of registering.
        names: of all parameters, likewise.
        seed: of what is drawn for them.
        order: the parameters, as they were registered.
    """

    dtypes: Mapping[int, torch.dtype]
    names: Mapping[int, str]
    seed: int
    order: list[nn.Parameter] = field(default_factory=list)

    def __enter__(self) -> None:
        self._thread, self._known = get_ident(), set[int]()
        self._draws = SeededDraws(self.seed)
        hook: Callable[..., Any] = self._registered
        self._handle = register_module_parameter_registration_hook(hook)
        self._draws.__enter__()  # type: ignore[no-untyped-call]  # torch's

    def __exit__(self, *error: object) -> None:
        self._handle.remove()
        self._draws.__exit__(*error)  # type: ignore[no-untyped-call]  # torch's

    def _registered(self, module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        if parameter is None or get_ident() != self._thread or id(parameter) in self._known:
            return None
        index = len(self.order)
        dtype = self.dtypes.get(index)
        value = parameter.detach().to("meta" if dtype is None else dtype)
        made = nn.Parameter(value, requires_grad=parameter.requires_grad)
        vars(made).update(vars(parameter))
        self.order.append(made)
        self._known.add(id(made))
        self._draws.name(made, self.names.get(index) or f"/{index}")
        self._draws.place = str(index)
        return made
