"""Tape: the operators of a forward, from which it is read how its loss is computed. Must not contain: their meaning."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor

from pipeflow.engine.torch_private.modes import FakeTensor
from pipeflow.engine.torch_private.tensors import LOCAL_SCALAR, PACK_PADDED, UNSAFE_INDEX
from pipeflow.engine.torch_private.trees import tree_leaves

_MASKED = {torch.ops.aten.index.Tensor, UNSAFE_INDEX}
INDEXING = {*_MASKED, torch.ops.aten.index_put.default, torch.ops.aten.index_put_.default}
"""Operators whose second argument is a list of indices, among which may be masks."""
PACKING = PACK_PADDED
BATCH_NORMS = {
    *("native_batch_norm", "_native_batch_norm_legit", "_native_batch_norm_legit_functional"),
    *("cudnn_batch_norm", "miopen_batch_norm"),
}
"""Names of operators that normalize over the samples of a batch, in training."""


@cache
def is_like(func: Any) -> bool:
    """Returns True if the result of an operator depends on the shape of its argument, but not on its values."""
    name = func.overloadpacket.__name__
    return bool(func.namespace == "aten" and (name.endswith("_like") or name.startswith("new_")))


def read_by(func: Any, args: tuple[Any, ...]) -> object:
    """The arguments of an operator of which Python sees values, or how many entries have some value."""
    if func in _MASKED:
        return [each for each in args[1] if is_mask(each)]
    return args if _reads(func) else ()


def is_mask(index: object) -> bool:
    """Returns True for an index that chooses the entries where it is not 0."""
    return isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8)


@cache
def _reads(func: Any) -> bool:
    tags = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
    return func not in INDEXING and not tags.isdisjoint(func.tags)


def packed(padded: Tensor, lengths: Tensor, batch_first: bool) -> tuple[Tensor, Tensor]:
    """A batch of padded sequences without values as a packed one. Its batch sizes depend on the lengths alone: they
    have values.
    """
    blank = torch.zeros((), dtype=padded.dtype).expand(padded.shape)
    made: tuple[Tensor, Tensor] = PACKING(blank, lengths, batch_first)
    return made


def written_to(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """The tensors that an operator writes to."""
    found = [
        kwargs.get(each) if isinstance(each, str) else args[each] if each < len(args) else None
        for each in written_by(func)
    ]
    return [leaf for leaf in tree_leaves(found) if isinstance(leaf, Tensor)]


@cache
def written_by(func: Any) -> tuple[int | str, ...]:
    """The arguments that an operator writes to, as positions or names of keywords."""
    return tuple(
        argument.name if argument.kwarg_only else index
        for index, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )


@cache
def returned_by(func: Any) -> tuple[int | None, ...]:
    """For each result of an operator, its index among the tensors that the operator writes to; None for another one."""
    arguments, results = ([each.alias_info for each in of] for of in (func._schema.arguments, func._schema.returns))
    written = [each.before_set for each in arguments if each is not None and each.is_write]
    return tuple(written.index(each.before_set) if each is not None and each.is_write else None for each in results)


def draws_in(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Returns True if an operator draws random numbers; with a probability of 0 it does not."""
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


Key = tuple[Any, ...]


class Leaves(Protocol):
    """The leaves of a microbatch by their indices, and buffers by their names, on the CPU."""

    def __getitem__(self, leaf: int | str) -> Any: ...


@dataclass(slots=True, eq=False)
class TapeNode:
    """A tensor, or a number that Python read from one, and how it was made.

    Attributes:
        func: the operator that made it; None if no operator did.
        args, kwargs: the arguments of the operator, with Nodes in place of tensors.
        shape, dtype: of the tensor.
        is_known: True if it depends on the batch, on buffers and on constants alone.
        storage: a number that stands for its memory.
        index: its index among several results of the operator; None for a single one.
        leaf: its index among the leaves of the batch, or the name of a buffer; None for another tensor.
        value: the tensor itself if no operator made it and it has values.
        is_source: True if it is a parameter or a buffer.
        is_sealed: True if how it was made does not matter: it is what a block returned, or the output of a module.
    """

    func: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    shape: torch.Size
    dtype: torch.dtype
    is_known: bool
    storage: int = 0
    index: int | None = None
    leaf: int | str | None = None
    value: Tensor | None = None
    is_source: bool = False
    is_sealed: bool = False

    @property
    def name(self) -> str:
        """The name of the operator without a final underscore; empty if there is none."""
        return "" if self.func is None else self.func.overloadpacket.__name__.removesuffix("_")

    def argument(self, name: str, default: Any = None) -> Any:
        """An argument by its name, or its default value."""
        for position, each in enumerate(self.func._schema.arguments):
            if each.name == name:
                found = self.args[position] if position < len(self.args) else self.kwargs.get(name, each.default_value)
                return default if found is None else found
        return default

    def nodes(self) -> list[TapeNode]:
        """The tensors among the arguments."""
        return list(_nodes((*self.args, *self.kwargs.values())))

    def numbers(self) -> list[Any]:
        """The numbers among the arguments, those in lists, too."""
        return [each for each in tree_leaves((self.args, dict(self.kwargs))) if type(each) in (int, float)]

    def seal(self) -> None:
        """Forgets how it was made."""
        self.func, self.args, self.kwargs, self.is_sealed = None, (), {}, True


@dataclass(frozen=True, slots=True, eq=False)
class Seen:
    """What Python may branch on: a truth value that it read from a known tensor, or a size that depends on a mask.

    Attributes:
        node: the known tensor.
        value: the truth value; of a mask, how many of its entries are not 0.
        is_size: True for a mask.
    """

    node: TapeNode
    value: float
    is_size: bool = False

    def holds(self, leaves: Leaves, known: dict[TapeNode, Any]) -> bool:
        """Returns True if it is the same for these leaves; of a mask, it counts whether 0, 1 or more are not 0."""
        try:
            found = replay(self.node, leaves, known)
        except Exception:  # it was written to in a way that cannot be repeated
            return False
        if self.is_size:
            return min(int(torch.count_nonzero(found)), 2) == min(self.value, 2)
        return float(found) == self.value


@dataclass(frozen=True, slots=True)
class Recorded:
    """How a scalar was computed from a microbatch: its node, and what Python read, as in Tape; `seen` in a criterion
    alone.
    """

    node: TapeNode
    read: list[tuple[float, TapeNode]]
    seen: list[Seen] = field(default_factory=list)


Moved = tuple[TapeNode, tuple[Any, ...]]  # the node of a tensor, and where its entries are


@dataclass
class Tape:
    """Records the operators of a forward.

    Args:
        storage: function that gives a number for the memory of a tensor.
        is_known: function that returns True if a tensor depends on the batch, buffers and constants alone.
        is_source: function that returns True if a tensor has the memory of a parameter or a buffer.

    Attributes:
        read: numbers that Python read from known tensors, with the tensors.
        seen: all that Python may branch on and that depends on the batch or on buffers.
    """

    storage: Callable[[Tensor], int]
    is_known: Callable[[Tensor], bool]
    is_source: Callable[[Tensor], bool]
    read: list[tuple[float, TapeNode]] = field(default_factory=list)
    seen: list[Seen] = field(default_factory=list)
    _nodes: dict[Key, TapeNode] = field(default_factory=dict)
    _keys: dict[int, list[Key]] = field(default_factory=dict)
    _made: dict[Any, TapeNode] = field(default_factory=dict)  # known nodes, by how they were made

    def give(self, leaves: Iterable[object]) -> None:
        """Tells which tensors are the leaves of the batch, in their order."""
        for index, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor):
                self._set(leaf, TapeNode(None, (), {}, leaf.shape, leaf.dtype, self.is_known(leaf), leaf=index))

    def give_buffer(self, name: str, tensor: Tensor) -> None:
        """Tells which tensor is a buffer, whose values are read where the loss is computed."""
        known = self.is_known(tensor)
        self._set(tensor, TapeNode(None, (), {}, tensor.shape, tensor.dtype, known, leaf=name, is_source=True))

    def put(self, tensor: Tensor, node: TapeNode | None = None) -> None:
        """Makes a tensor an output of a module, or the result that another tape recorded as `node`."""
        made = TapeNode(None, (), {}, tensor.shape, tensor.dtype, False, is_sealed=True) if node is None else node
        self._set(tensor, made)

    def before(self, func: Any, args: tuple[Any, ...]) -> Moved | None:
        """What is known of a tensor of which an operator will change the shape or strides in place, as `squeeze_`; None
        for other operators.
        """
        return (self.of(args[0]), _entries(args[0])) if torch.Tag.inplace_view in func.tags else None

    def note(
        self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: object, moved: Moved | None = None
    ) -> None:
        """Records one operator after it ran. `moved` is what `before` returned."""
        if moved is not None and moved[1] == _entries(args[0]):
            self._set(args[0], moved[0])
            return
        given, options = self._replaced(args), {name: self._replaced(each) for name, each in kwargs.items()}
        given = given if moved is None else (moved[0], *given[1:])
        self._see(func, args, given, output)
        results = output if isinstance(output, tuple | list) else [output]
        is_in_place = func._schema.is_mutable
        written = written_to(func, args, dict(kwargs)) if is_in_place and moved is None else []
        for each in (*written, *results) if written else ():
            if isinstance(each, Tensor):
                self._forget(each)
        first = self._key(args[0]) if args and isinstance(args[0], Tensor) and not is_in_place else None
        for index, each in enumerate(results):
            if isinstance(each, Tensor) and self._key(each) != first:  # else it is the same tensor
                place = index if isinstance(output, tuple | list) else None
                made = TapeNode(func, given, options, each.shape, each.dtype, self.is_known(each), index=place)
                if made.is_known and not written:
                    made = self._made.setdefault((func, _hashable(given), _hashable([*options.items()]), place), made)
                self._set(each, made)
                if written and (at := returned_by(func)[index]) is not None:  # another object may stand for it: a fake
                    self._set(written[at], made)

    def of(self, tensor: Tensor) -> TapeNode:
        """The node of a tensor."""
        key = self._key(tensor)
        node = self._nodes.get(key)
        if node is None:
            is_seen = key[0] in self._keys
            is_real = not is_seen and not isinstance(tensor, FakeTensor)
            value = tensor.detach() if is_real else None
            node = TapeNode(None, (), {}, tensor.shape, tensor.dtype, self.is_known(tensor), value=value)
            node.is_source = not is_seen and self.is_source(tensor)
            self._set(tensor, node)
        return node

    def _see(self, func: Any, args: tuple[Any, ...], given: tuple[Any, ...], output: object) -> None:
        """Records what Python may branch on after an operator ran."""
        first = given[0] if given else None
        if type(output) in (bool, int, float) and isinstance(first, TapeNode):
            of = first
            if func is not LOCAL_SCALAR:
                of = TapeNode(
                    func, given, {}, torch.Size(), torch.float64, all(each.is_known for each in _nodes(given))
                )
            if of.is_known and type(output) is not bool:
                self.read.append((float(output), first))  # type: ignore[arg-type]  # a number, as its type says
            elif of.is_known and _varies(of):
                self.seen.append(Seen(of, float(output)))  # type: ignore[arg-type]  # likewise
        for tensor in tree_leaves(read_by(func, args)) if isinstance(output, Tensor) else ():
            is_chosen = is_mask(tensor) or (isinstance(tensor, Tensor) and func is torch.ops.aten.nonzero.default)
            if is_chosen and (node := self.of(tensor)).is_known and _varies(node):
                self.seen.append(Seen(node, float(torch.count_nonzero(tensor)), is_size=True))

    def _forget(self, tensor: Tensor) -> None:
        """Drops what is known of all tensors that share the memory, since an operator wrote to it."""
        for key in self._keys.get(self.storage(tensor), []):
            if key in self._nodes:
                old = self._nodes[key]
                self._nodes[key] = TapeNode(None, (), {}, old.shape, old.dtype, old.is_known, old.storage)

    def _set(self, tensor: Tensor, node: TapeNode) -> None:
        key = self._key(tensor)
        node.storage = key[0]
        self._nodes[key] = node
        self._keys.setdefault(key[0], []).append(key)

    def _key(self, tensor: Tensor) -> Key:
        """The same for tensors that are the same part of the same memory."""
        storage = self.storage(tensor)
        if tensor.layout is not torch.strided:
            return storage, id(tensor)
        return storage, tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), tensor.dtype

    def _replaced(self, value: Any) -> Any:
        return _mapped(value, lambda each: self.of(each) if isinstance(each, Tensor) else each)


def _mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """An argument of an operator with `change` of each entry of its tuples and lists."""
    return type(value)(_mapped(each, change) for each in value) if type(value) in (tuple, list) else change(value)


def _entries(tensor: Tensor) -> tuple[Any, ...]:
    """The same for tensors with the same entries of the same memory at the same indices."""
    strides = [stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1]
    return tuple(tensor.shape), strides, tensor.storage_offset()


_VIEW, _RESHAPED = torch.ops.aten.view.default, torch.ops.aten.reshape.default


def _varies(node: TapeNode) -> bool:
    """Returns True if a known tensor depends on the batch or on buffers."""
    sources = (each for each in upstream(node) if each.func is None)
    return any(each.leaf is not None or each.value is None for each in sources)  # or nobody knows how it was made


def upstream(node: TapeNode) -> Iterable[TapeNode]:
    """A tensor and all from which it was made."""
    pending, seen = [node], {node}
    while pending:
        each = pending.pop()
        yield each
        more = [its for its in dict.fromkeys(each.nodes()) if its not in seen]
        seen.update(more)
        pending += more


def _hashable(value: Any) -> Any:
    return tuple(map(_hashable, value)) if type(value) in (tuple, list) else value


def _nodes(values: Iterable[Any]) -> Iterable[TapeNode]:
    for value in values:
        if isinstance(value, TapeNode):
            yield value
        elif type(value) in (tuple, list):
            yield from _nodes(value)


def replay(node: TapeNode, leaves: Leaves, known: dict[TapeNode, Any]) -> Any:
    """The value of a known node, on the CPU, for these leaves. `known` keeps the values of nodes."""
    if node in known:
        return known[node]
    if node.func is None:
        found = leaves[node.leaf] if node.leaf is not None else node.value if node.value is None else node.value.cpu()
    else:
        found = again(node, lambda value: replay(value, leaves, known) if isinstance(value, TapeNode) else value)
    known[node] = found
    return found


def again(node: TapeNode, valued: Callable[[Any], Any]) -> Any:
    """The result of an operator on the CPU, with the arguments that `valued` returns for those of the node."""

    def of(value: Any) -> Any:
        return torch.device("cpu") if isinstance(value, torch.device) else valued(value)

    args, kwargs = _mapped(node.args, of), {name: _mapped(each, of) for name, each in node.kwargs.items()}
    if node.func._schema.is_mutable:
        args = (args[0].clone(), *args[1:])
    found = (_RESHAPED if node.func is _VIEW else node.func)(*args, **kwargs)  # parts of a batch need not be contiguous
    return found if node.index is None else found[node.index]
