"""Flow: from which parameters, buffers and received values each tensor of a forward is computed, without memory or
arithmetic for what depends on any of them. What must not live here: module calls.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

RANDOM = 1
"""The source of what is drawn at random."""

_LIKE = {
    *("aten.zeros_like", "aten.ones_like", "aten.empty_like", "aten.full_like"),
    *("aten.rand_like", "aten.randn_like", "aten.randint_like"),
    *("aten.new_zeros", "aten.new_ones", "aten.new_empty", "aten.new_full", "aten.new_empty_strided"),
}
"""Operators whose result has the shape of their argument, and nothing of its values."""
_INDEXING = {
    torch.ops.aten.index.Tensor,
    torch.ops.aten.index_put.default,
    torch.ops.aten.index_put_.default,
    torch.ops.aten._unsafe_index.Tensor,
}
_COUNTED = {"aten.nll_loss_forward": 1, "aten.nll_loss2d_forward": 1}
"""Losses that count their targets, and the argument that these are."""


class Flow(TorchDispatchMode):
    """Runs the operators of a forward on fake tensors, and keeps per storage the set of sources that flowed into it: an
    integer with a bit per source. What is computed from the batch alone is computed really, so a forward may decide by
    it. Tensors that share memory share their sources.

    Args:
        fakes: the mode of the fake parameters.
        real: the sources, as bits, that have values: those of buffers.
        draw: what single random numbers are taken to be, so that it can be told whether a forward decides by them.

    Attributes:
        where: the number of the call in which operators run, kept by the watcher of calls.
        clock: counts the entries into calls and the exits from them, kept likewise.
        born: by storage, the call in which it was made.
        uses: by storage and call, when the storage was last read there, where that is not the call that made it.
        written: the storages that were written to in place.
        decided: the calls that read a number that was drawn at random.
        targets: how many targets count, of each loss that counts its targets and whose targets are in the batch.
        is_live: whether draws are this stage's own: others are sources.
    """

    def __init__(self, fakes: FakeTensorMode, real: int = 0, draw: float = 0.0) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self._fakes = fakes
        self._real = real | RANDOM
        self._draw = draw
        self._sources: dict[int, int] = {}
        self._alive: dict[int, Any] = {}  # storages, so that none is taken for another one in its place
        self.where = 0
        self.clock = 0
        self.born: dict[int, int] = {}
        self.uses: dict[tuple[int, int], int] = {}
        self.written: set[int] = set()
        self.decided: list[int] = []
        self.targets: list[int] = []
        self.is_live = False

    def mark(self, tensor: Tensor, sources: int) -> int:
        """Adds to the sources of the tensor's storage, whose key is returned."""
        key = self.key(tensor)
        self._sources[key] = self._sources.get(key, 0) | sources
        return key

    def key(self, tensor: Tensor) -> int:
        """What stands for the memory of a tensor."""
        try:
            storage: Any = tensor.untyped_storage()
            key: int = storage._cdata
        except (NotImplementedError, RuntimeError):  # a layout without a storage
            storage, key = tensor, -id(tensor)
        self._alive.setdefault(key, storage)
        return key

    def sources(self, tree: object) -> int:
        """Those of all tensors in a tree."""
        found = 0
        for leaf in tree_leaves(tree):
            if isinstance(leaf, Tensor):
                found |= self._sources.get(self.key(leaf), 0)
        return found

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        sources, is_fake, read = 0, False, set[int]()
        for tensor in tree_leaves((args, kwargs)):
            if not isinstance(tensor, Tensor):
                continue
            key = self.key(tensor)
            read.add(key)
            own = self._sources.get(key, 0)
            sources |= own
            is_fake = is_fake or isinstance(tensor, FakeTensor) or bool(own & ~self._real)
            if self.born.get(key, self.where) != self.where:
                self.uses[key, self.where] = self.clock
        if func is torch.ops.aten._local_scalar_dense.default and sources & RANDOM and not is_fake:
            self.decided.append(self.where)
        self._count(func, args)
        draws = _draws(func, args, kwargs)
        with_shape_only = str(func.overloadpacket) in _LIKE
        output = self._run(func, args, kwargs, is_fake=is_fake, draws=draws)
        if with_shape_only:
            sources = 0
        if draws and not self.is_live:
            sources |= RANDOM
        self._note(output, sources, read)
        for index in _written_by(func):
            target = kwargs.get(index) if isinstance(index, str) else args[index] if index < len(args) else None
            for tensor in tree_leaves(target):
                if isinstance(tensor, Tensor):
                    self.written.add(self.mark(tensor, sources))
        return output

    def _run(self, func: Any, args: Any, kwargs: Any, *, is_fake: bool, draws: bool) -> Any:
        if not is_fake and not draws:
            return func(*args, **kwargs)
        if func in _INDEXING:
            args = (args[0], self._without_masks(args[1]), *args[2:])
        with self._fakes:
            output = func(*args, **kwargs)
        if not is_fake and isinstance(output, Tensor) and output.numel() == 1 and not _written_by(func):
            return torch.full(output.shape, self._draw, dtype=output.dtype, device=output.device)
        return output

    def _without_masks(self, indices: list[Any]) -> list[Any]:
        """Indices with the places of masks that have values, so that the length of the result is known."""
        found: list[Any] = []
        for index in indices:
            is_mask = isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8)
            if is_mask and not isinstance(index, FakeTensor) and not self.sources(index) & ~self._real:
                found += index.nonzero().unbind(1)
            else:
                found.append(index)
        return found

    def _note(self, output: object, sources: int, read: set[int]) -> None:
        for leaf in tree_leaves(output):
            if isinstance(leaf, Tensor):
                key = self.key(leaf)
                if key not in read:
                    self.born[key] = self.where
                if sources:
                    self._sources[key] = self._sources.get(key, 0) | sources

    def _count(self, func: Any, args: tuple[Any, ...]) -> None:
        position = _COUNTED.get(str(func.overloadpacket))
        if position is None or len(args) < 5:
            return
        target, ignored = args[position], args[4]
        if not isinstance(target, FakeTensor) and not self.sources(target) & ~self._real:
            self.targets.append(int((target != ignored).sum()))


@cache
def _written_by(func: Any) -> tuple[int | str, ...]:
    """The arguments that an operator writes to: positions, or names of keywords."""
    return tuple(
        argument.name if argument.kwarg_only else index
        for index, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )


def _draws(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether an operator draws random numbers: one with a probability of 0 does not."""
    position = _drawing(func)
    if position is None:
        return False
    if isinstance(position, str):
        return True
    name, index = position
    probability = kwargs.get(name, args[index] if index < len(args) else 0.0)
    return bool(probability)


@cache
def _drawing(func: Any) -> str | tuple[str, int] | None:
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return None
    for index, argument in enumerate(func._schema.arguments):
        if argument.name in ("dropout_p", "p") and str(func.overloadpacket) != "aten.bernoulli_":
            return argument.name, index
    return "always"
