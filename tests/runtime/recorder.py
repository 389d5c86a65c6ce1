"""A stand-in of CUDA graphs: it records the operators of a call by the addresses of their tensors, and runs them again.

As with CUDA, recording changes no memory that was there before, and draws no random numbers; a graph holds only what
was made while it was recorded. Before the first replay, all of that is filled with NaN. A replay notices if memory that
it needs was freed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from pipeflow.engine.runtime.program import graphs

ATEN = torch.ops.aten
WAITS = (ATEN._local_scalar_dense.default, ATEN.nonzero.default, ATEN.equal.default)


class Address(NamedTuple):
    """A tensor by its address."""

    storage: int
    nbytes: int
    device: torch.device
    dtype: torch.dtype
    place: tuple[Any, ...]  # offset, shape, strides
    is_alive: Callable[[], bool]

    @classmethod
    def of(cls, tensor: Tensor) -> Address:
        storage, weak = tensor.untyped_storage(), StorageWeakRef(tensor.untyped_storage())
        place = int(tensor.storage_offset()), tensor.size(), tensor.stride()
        return cls(storage.data_ptr(), storage.nbytes(), tensor.device, tensor.dtype, place, lambda: not weak.expired())

    def tensor(self) -> Tensor:
        """The memory as a tensor. Raises AssertionError if it was freed."""
        assert not self.nbytes or self.is_alive(), "a graph needs memory that was freed"
        memory = torch._C._construct_storage_from_data_pointer(self.storage, self.device, self.nbytes)
        return torch.empty(0, dtype=self.dtype, device=self.device).set_(memory, *self.place)


class Graph(TorchDispatchMode):
    """Operators, in the order in which they were recorded."""

    def __init__(self, pool: Pool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # as torch has it
        self.pool, self.operators = pool, list[tuple[Any, Any, Any, list[Address]]]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in WAITS:
            raise RuntimeError("operation not permitted when stream is capturing")
        given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        if func is ATEN.lift_fresh.default:
            self.pool.keep(given[0])
        before = [(each, each.clone()) for each in given if not self.pool.has(each)]
        result = func(*args, **kwargs)
        for each, values in before:
            each.copy_(values)
        addresses = {_address(each) for each in given}
        made = [each for each in tree_leaves(result) if isinstance(each, Tensor) and _address(each) not in addresses]
        for each in made:
            self.pool.keep(each)
        named = tree_map(lambda each: Address.of(each) if isinstance(each, Tensor) else each, (args, kwargs))
        places = [Address.of(each) for each in tree_leaves(result) if isinstance(each, Tensor)]
        self.operators.append((func, *named, places))
        return result

    @torch.no_grad()
    def replay(self) -> None:
        """Runs the operators, and writes what they make to where it was made."""
        self.pool.begin()
        REPLAYS["replays"] += 1
        for func, args, kwargs, places in self.operators:
            own = tree_map(
                lambda each: each.tensor() if isinstance(each, Address) else each,
                (args, kwargs),
                is_leaf=lambda each: isinstance(each, Address),
            )
            result = func(*own[0], **own[1])
            tensors = [each for each in tree_leaves(result) if isinstance(each, Tensor)]
            for each, place in zip(tensors, places, strict=True):
                if _address(each) != place.storage:
                    place.tensor().copy_(each)


class Pool:
    """The memory of the graphs that share it."""

    def __init__(self) -> None:
        self._kept: dict[int, Any] = {}  # storages
        self._begun = False

    def keep(self, tensor: Tensor) -> None:
        """Keeps the memory of a tensor."""
        self._kept[_address(tensor)] = tensor.untyped_storage()

    def has(self, tensor: Tensor) -> bool:
        """Whether a tensor lies in this memory."""
        return _address(tensor) in self._kept

    def begin(self) -> None:
        """Fills it before the first replay."""
        if not self._begun:
            for each in self._kept.values():
                each.fill_(255)
        self._begun = True


REPLAYS: Counter[str] = Counter()


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def capturing(_: torch.device) -> graphs.Capture:
    """In the place of `graphs.capturing`."""
    pool = Pool()

    def capture(call: Callable[[], None]) -> Callable[[], None]:
        graph, generator = Graph(pool), torch.get_rng_state()
        REPLAYS["graphs"] += 1
        with graph:
            call()
        torch.set_rng_state(generator)
        return graph.replay

    return capture


@contextmanager
def recorders() -> Iterator[Counter[str]]:
    """Context manager in which graphs are recorded by the stand-in. Counts graphs and replays of all threads."""
    REPLAYS.clear()
    with patch.object(graphs, "capturing", capturing):
        yield REPLAYS
