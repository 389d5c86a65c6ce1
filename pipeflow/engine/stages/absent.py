"""Absent: stands for an object or a tensor that a stage does not have. Must not contain: which these are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.utils import swap_tensors

from pipeflow.core.errors import UsageError
from pipeflow.engine.stages.tape import PACKING, is_like, packed, read_by, returned_by, written_to
from pipeflow.engine.torch_private.modes import TorchDispatchMode, no_dispatch
from pipeflow.engine.torch_private.tensors import OpOverload, make_wrapper, no_torch_function
from pipeflow.engine.torch_private.trees import tree_leaves, tree_map

# Theory of operation
#
# A stage runs the whole forward, so operators run on values that it does not have, before its own part begins. Their
# results are not needed, as the plan has proved for the way that the forward took on the example. If the forward takes
# another way, they may be. So a tensor that a stage does not have knows that: it has a shape, a dtype and a device, but
# no values, and neither has what an operator computes from it. An error is raised where a value is needed after all:
# where Python reads it, where it is sent or returned, and where it is written to memory that has values. A plan may
# have such writes (`zeros(...)[:, 1:] = x`); then `Reads` takes that memory for absent from the write on.

NO_DATA = "data is not allocated"
"""What torch says if a kernel reads a tensor without values past all dispatch, as `torch.tensor([tensor])` does."""
_HOW = (
    "which this stage does not have: the forward did not read it here when it was planned, on the first microbatch of "
    "the example, so it takes another way now. Give an example that takes this way, pass what decides the way as a "
    "bool, int or str of the batch (each value is planned), or read the tensor on every way: "
    "torch.where(torch.tensor(flag), one, other)"
)


class Reads(TorchDispatchMode):
    """What a stage knows of the absent tensors that it has. As a mode it sees every operator of a forward in which they
    may be written to memory that has values; then that memory is absent. So it is for those stages alone that do so by
    their plan.

    Attributes:
        error: the error of a read in this forward; None without one.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self.error: UsageError | None = None
        self._written: dict[int, tuple[Any, str]] | None = None  # the memory, kept, and what was written to it

    @contextmanager
    def during(self, *, mixes: bool) -> Iterator[None]:
        """A region for a forward of the stage, which may write absent tensors to memory that has values if it `mixes`.
        A read of an absent tensor ends in an error, even if the module catches it.
        """
        self.error, self._written = None, {} if mixes else None
        try:
            with self if mixes else nullcontext():
                yield
            if self.error is not None:
                raise self.error
        except RuntimeError as error:
            if NO_DATA not in str(error):
                raise
            raise UsageError(f"it reads the values of a tensor {_HOW}") from error
        finally:
            self._written = None

    def require_present(self, tree: object) -> None:
        """Raises UsageError if a tensor in the tree is absent."""
        for leaf in tree_leaves(tree):
            found = self.of(leaf)
            if isinstance(found, AbsentTensor):
                found.refuse()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if any(isinstance(self.of(leaf), AbsentTensor) for leaf in tree_leaves((args, kwargs))):
            return _computed(func, args, kwargs, self)
        return func(*args, **kwargs)

    def write(self, tensor: Tensor, absent: AbsentTensor) -> None:
        """Takes the memory of a tensor for absent, because `absent` was written to it. Outside of a region in which
        that may be, raises UsageError.
        """
        if self._written is None:
            absent.refuse()
        storage = tensor.untyped_storage()
        self._written.setdefault(storage._cdata, (storage, absent.what))

    def of(self, leaf: Any) -> Any:
        """The leaf itself, or, of a tensor in memory that is absent, one without values."""
        if not self._written or not isinstance(leaf, Tensor) or isinstance(leaf, AbsentTensor):
            return leaf
        found = self._written.get(leaf.untyped_storage()._cdata) if leaf.layout is torch.strided else None
        return leaf if found is None else AbsentTensor(found[1], self, leaf)


class Absent:
    """An object whose use raises UsageError.

    Args:
        said: text of the error.
    """

    def __init__(self, said: str) -> None:
        self.__dict__["_said"] = said

    def _refuse(self, *_: object, **__: object) -> Any:
        raise UsageError(self.__dict__["_said"])

    __getattr__ = __getitem__ = __iter__ = __call__ = __bool__ = __len__ = __setattr__ = _refuse


class AbsentTensor(Tensor):
    """A tensor without values. Operators on it make other such tensors; what needs a value raises UsageError.

    Args:
        what: which tensor it is, for errors.
        reads: those of its stage.
        like: a tensor with its shape, strides and dtype.
        device: its device, that of `like` by default.
    """

    what: str
    reads: Reads

    @staticmethod
    def __new__(cls, what: str, reads: Reads, like: Tensor, device: torch.device | None = None) -> AbsentTensor:
        made: AbsentTensor = make_wrapper(
            cls, like.shape, strides=like.stride(), dtype=like.dtype, device=like.device if device is None else device
        )
        made.what, made.reads = what, reads
        return made

    def __init__(self, *_: object, **__: object) -> None:
        super().__init__()

    __torch_function__ = no_torch_function  # as torch's subclasses do

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's has no types of its own
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        absent = next(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, AbsentTensor))
        return _computed(func, args, kwargs, absent.reads)

    def refuse(self, *_: object, **__: object) -> NoReturn:
        """Raises UsageError because a value is needed."""
        error = self.reads.error = UsageError(f"it reads {self.what}, {_HOW}")
        raise error

    tolist = numpy = data_ptr = __array__ = __dlpack__ = __format__ = refuse

    def __repr__(self, **_: object) -> str:  # type: ignore[override]  # torch's has an argument for its contents
        return f"AbsentTensor({self.what!r}, {tuple(self.shape)}, {self.dtype})"

    def __deepcopy__(self, memo: object) -> AbsentTensor:
        return AbsentTensor(self.what, self.reads, self)

    def __reduce_ex__(self, protocol: object) -> Any:
        return _made, (self.what, tuple(self.shape), self.stride(), self.dtype, self.device)

    def become(self, tensor: Tensor) -> None:
        """Turns into a tensor with values, for all who hold it."""
        swap_tensors(self, tensor)


def _made(what: str, shape: Any, stride: Any, dtype: torch.dtype, device: torch.device) -> AbsentTensor:
    return AbsentTensor(what, Reads(), torch.empty_strided(shape, stride, dtype=dtype, device="meta"), device)


def _computed(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], reads: Reads) -> Any:
    """What an operator makes of arguments some of which are absent."""
    written = written_to(func, args, kwargs) if isinstance(func, OpOverload) else []
    args, kwargs = tree_map(reads.of, (args, kwargs))
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    absent = next(leaf for leaf in tensors if isinstance(leaf, AbsentTensor))
    if not isinstance(func, OpOverload):  # it runs code that cannot be looked into
        absent.refuse()
    for leaf in tree_leaves(read_by(func, args)):
        if isinstance(leaf, AbsentTensor):
            leaf.refuse()
    if is_like(func):
        args, kwargs = tree_map(_blank, (args, kwargs))
        return func(*args, **kwargs)
    for tensor in written:
        if not isinstance(tensor, AbsentTensor):
            reads.write(tensor, absent)
    if torch.Tag.inplace_view in func.tags:
        with no_dispatch():
            return func(*args, **kwargs)
    if func is PACKING and not isinstance(args[1], AbsentTensor):
        data, sizes = packed(*args)
        return AbsentTensor(absent.what, absent.reads, data, absent.device), sizes
    device = kwargs.get("device") or next((each for each in tensors if each.dim()), absent).device
    made = tree_map(
        lambda leaf: AbsentTensor(absent.what, absent.reads, leaf, device) if isinstance(leaf, Tensor) else leaf,
        _shaped(func, args, kwargs),
    )
    return _with_written(func, made, written)


def _shaped(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """An output of the operator with the right shapes: on the meta device if it can be, else computed."""
    try:
        less, named = tree_map(_on_meta, (args, kwargs))
        return func(*less, **named)
    except Exception:  # no kernel for that device, or an error of the module, which is raised below
        more, named = tree_map(_zeros, (args, kwargs))
        return func(*more, **named)


def _on_meta(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device="meta")
    return torch.device("meta") if isinstance(leaf, torch.device) else leaf


def _blank(leaf: Any) -> Any:
    """Zeros in place of an absent tensor, which share the memory of one."""
    if not isinstance(leaf, AbsentTensor):
        return leaf
    return torch.zeros((), dtype=leaf.dtype, device=leaf.device).expand(leaf.shape)


def _zeros(leaf: Any) -> Any:
    return _blank(leaf).contiguous() if isinstance(leaf, AbsentTensor) else leaf


def _with_written(func: Any, output: Any, written: Sequence[Tensor]) -> Any:
    """The output of an operator, in which it returns the tensors themselves to which it wrote."""
    places = returned_by(func)
    if all(place is None for place in places):
        return output
    outputs = [output] if len(places) == 1 else output
    made = [leaf if place is None else written[place] for place, leaf in zip(places, outputs, strict=True)]
    return made[0] if len(places) == 1 else tuple(made)
