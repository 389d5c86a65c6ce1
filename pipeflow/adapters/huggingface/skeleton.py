"""Skeletons: transformers models with parameters on the meta device and real buffers (checkpoints lack most buffers);
and initial values of some parameters. Both come from the class's own constructor, whose random numbers depend on the
tensor that they fill, and not on earlier draws. Must not contain: files, or stages.
"""

from __future__ import annotations

import copy
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from threading import RLock, get_ident
from typing import Any
from zlib import crc32

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from pipeflow.core.errors import UsageError
from pipeflow.engine.torch_private.modes import TorchDispatchMode
from pipeflow.engine.torch_private.tensors import storage_key

ONE_AT_A_TIME = RLock()  # all threads share torch's hook, and functions that transformers replaces meanwhile


@dataclass(frozen=True)
class Blueprint:
    """A model that can be made, in whole or in part.

    Attributes:
        kind: the model's class.
        config: the model's configuration.
        dtype: torch's default dtype while the model is made; the dtype of its parameters unless the class sets another.
    """

    kind: Any
    config: Any
    dtype: torch.dtype

    def skeleton(self) -> Any:
        """Makes the model in evaluation mode, with all parameters on the meta device.

        Raises UsageError if its class cannot make it.
        """
        model, _ = self._constructed()
        self._widen(model)
        return model.eval()

    def initial(self, names: Collection[str], seed: int) -> dict[str, Tensor]:
        """Initial values of the parameters `names`, from the class's own constructor and `_init_weights`. Random values
        depend only on `seed` and the parameter's name.

        Raises UsageError for a parameter that the class makes as a copy of another one.
        """
        if not names:
            return {}
        first, order = self._constructed()
        known = {id(parameter): name for name, parameter in first.named_parameters()}
        by_index = {index: known.get(id(parameter), "") for index, parameter in enumerate(order)}
        self._widen(first)
        dtypes = {index: first.get_parameter(name).dtype for index, name in by_index.items() if name in names}
        model, _ = self._constructed(dtypes, by_index, seed)
        made = dict(model.named_parameters())
        if unmade := [name for name in names if made[name].is_meta]:
            raise UsageError(
                f"{self.kind.__name__} makes {unmade[0]} as a copy of another parameter, so it cannot be made in "
                "parts: save the whole model with transformers, and load it with from_pretrained"
            )
        return {name: made[name].detach() for name in names}

    def _constructed(
        self, dtypes: Mapping[int, torch.dtype] | None = None, names: Mapping[int, str] | None = None, seed: int = 0
    ) -> tuple[Any, list[nn.Parameter]]:
        """The model, with its parameters on the meta device except some; and all of them in the order of registration.

        Args:
            dtypes: dtypes of the parameters that are kept, by their index in this order.
            names: names of all parameters, by the same index.
            seed: seed of their random values.
        """
        dtypes, names = dtypes or {}, names or {}
        order, known, thread, draws = list[nn.Parameter](), set[int](), get_ident(), SeededDraws(seed)

        def registered(module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
            if parameter is None or get_ident() != thread or id(parameter) in known:
                return None
            index = len(order)
            value = parameter.detach().to(dtypes.get(index, "meta"))
            made = nn.Parameter(value, requires_grad=parameter.requires_grad)
            vars(made).update(vars(parameter))
            order.append(made)
            known.add(id(made))
            draws.name(made, names.get(index) or f"/{index}")
            draws.place = str(index)
            return made

        with ONE_AT_A_TIME, draws, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            default = torch.get_default_dtype()  # read under the lock: another thread may have changed it
            torch.set_default_dtype(self.dtype)
            hook: Callable[..., Any] = registered
            handle = register_module_parameter_registration_hook(hook)
            try:
                return self.kind(copy.deepcopy(self.config)), order
            except Exception as error:
                raise UsageError(f"{self.kind.__name__} cannot be made from this configuration: {error}") from error
            finally:
                handle.remove()
                torch.set_default_dtype(default)

    def _widen(self, model: Any) -> None:
        """Sets parameters to float32 that the model keeps in float32 under any dtype."""
        kept = set[str]()
        if self.dtype is torch.float16:
            kept |= set(getattr(model, "_keep_in_fp32_modules", None) or ())
        if self.dtype in (torch.float16, torch.bfloat16):
            kept |= set(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
        for name, parameter in model.named_parameters() if kept else ():
            if parameter.is_floating_point() and any(f".{each}." in f".{name}." for each in kept):
                parameter.data = parameter.data.float()


_GENERATOR = RLock()  # torch's own, which all threads share


class SeededDraws(TorchDispatchMode):
    """Inside the `with` block, each random operator of this thread gets its own seed. It depends on `seed`, the name of
    the tensor that the operator fills, and how often that tensor was filled before. torch's generator stays unchanged.

    Attributes:
        place: used instead of the name if an operator fills no named tensor.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self.place = ""
        self._seed = seed
        self._names: dict[int, str] = {}
        self._alive: list[Any] = []  # storages, so that none is taken for another one in its place
        self._counts: Counter[str] = Counter()

    def name(self, tensor: Tensor, name: str) -> None:
        """Names the memory of a tensor."""
        self._alive.append(tensor.untyped_storage())
        self._names[storage_key(tensor)] = name

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        name = self._name_of(args)
        seed = crc32(f"{self._seed}/{name}/{self._counts[name]}".encode())
        self._counts[name] += 1
        with _GENERATOR:
            state = torch.default_generator.get_state()
            torch.default_generator.manual_seed(seed)
            try:
                return func(*args, **kwargs)
            finally:
                torch.default_generator.set_state(state)

    def _name_of(self, arguments: tuple[Any, ...]) -> str:
        first = arguments[0] if arguments else None
        key = storage_key(first) if isinstance(first, Tensor) else None
        return f"/{self.place}" if key is None else self._names.get(key, f"/{self.place}")
