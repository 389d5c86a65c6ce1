"""The process's random generators outside of torch, as tensors: Python's own, and numpy's global one if numpy is
loaded. Must not contain: names in a checkpoint.
"""

from __future__ import annotations

import random
import struct
import sys
from typing import Any, NamedTuple

import torch
from torch import Tensor

_MERSENNE = "MT19937"  # the only bit generator of numpy's that np.random.seed makes


def generator_states(*, load_numpy: bool = False) -> dict[str, Tensor]:
    """The states by name: "python", and "numpy" if its generators are loaded, and the global one is the usual one.

    Args:
        load_numpy: loads numpy's generators first.
    """
    if load_numpy:
        import numpy.random  # noqa: F401  # only then, because it loads slowly
    version, numbers, spare = random.getstate()
    states = {"python": _State([version, *numbers], spare is not None, spare or 0.0).packed()}
    if (of_numpy := sys.modules.get("numpy.random")) is not None:
        told = of_numpy.get_state(legacy=False)
        if told["bit_generator"] == _MERSENNE:
            numbers = [*told["state"]["key"].tolist(), told["state"]["pos"]]
            states["numpy"] = _State(numbers, bool(told["has_gauss"]), told["gauss"]).packed()
    return states


def set_generator(name: str, state: Tensor, *, only_try: bool = False) -> None:
    """Sets the generator `name` to a state of `generator_states`, or only tries it on another generator. Raises
    ValueError for a state that it does not accept.
    """
    numbers, has_spare, spare = _State.unpacked(state)
    if name == "python":
        target = random.Random() if only_try else random
        target.setstate((numbers[0], tuple(numbers[1:]), spare if has_spare else None))
    else:
        of_numpy: Any = sys.modules["numpy.random"]
        generator = of_numpy.RandomState() if only_try else of_numpy
        key = {"key": numbers[:-1], "pos": numbers[-1]}
        generator.set_state({"bit_generator": _MERSENNE, "state": key, "has_gauss": has_spare, "gauss": spare})


class _State(NamedTuple):
    """The numbers of a Mersenne Twister, and the second of two normal numbers if it has drawn only the first."""

    numbers: list[int]
    has_spare: bool
    spare: float

    def packed(self) -> Tensor:
        bits = struct.unpack("<q", struct.pack("<d", self.spare))[0]
        return torch.tensor([*self.numbers, int(self.has_spare), bits], dtype=torch.int64, device="cpu")

    @classmethod
    def unpacked(cls, state: Tensor) -> _State:
        *numbers, has_spare, bits = state.tolist()
        return cls(numbers, bool(has_spare), struct.unpack("<d", struct.pack("<q", bits))[0])
