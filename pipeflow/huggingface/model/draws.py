"""SeededDraws: random numbers that depend on the tensor they fill, and not on earlier draws."""

from __future__ import annotations

from collections import Counter
from threading import RLock
from typing import Any
from zlib import crc32

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

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
        storage: Any = tensor.untyped_storage()
        self._alive.append(storage)
        self._names[storage._cdata] = name

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
        storage: Any = first.untyped_storage() if isinstance(first, Tensor) else None
        return f"/{self.place}" if storage is None else self._names.get(storage._cdata, f"/{self.place}")
