"""Sliced: a tensor with an entry or a row for each token, which is computed for one slice of the tokens at a time, and
never in memory as a whole. Must not contain: which functions act on each token alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.autograd.graph import saved_tensors_hooks

from pipeflow.core.errors import UsageError
from pipeflow.engine.deferral.products import Deferral
from pipeflow.engine.torch_private.autograd import without_torch_function
from pipeflow.engine.torch_private.tensors import make_wrapper
from pipeflow.engine.torch_private.trees import tree_flatten, tree_leaves, tree_map, tree_unflatten

# Theory of operation
#
# The head's input is whole; what follows is written down, not computed. Each function that a forward or a criterion
# calls on the logits makes another Sliced, which knows how its rows follow from rows of the one before. A shape is an
# index: which rows of the one before are its own. When a sum over all rows is asked for, it is computed slice by slice,
# with the gradients of each slice, so that the logits of one slice at a time exist. The sum is an ordinary tensor with
# a graph, whose backward multiplies these gradients.
#
# Only what follows the head is computed twice, or late; so it does not matter that Python has gone on meanwhile.

Rule = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
"""What a function that acts on each token alone makes of Sliced arguments."""
_ATTRIBUTES = """
    shape dtype device requires_grad ndim layout is_cuda is_meta is_sparse is_nested is_leaf names itemsize size dim
    numel nelement is_floating_point is_complex __len__ __hash__ __repr__ is_contiguous stride get_device
"""
ATTRIBUTES = frozenset(_ATTRIBUTES.split())
"""What may be read of a Sliced, since it needs no values."""
Rows = Callable[[Tensor, Any], Tensor]
"""Returns rows: those at some positions, in a Part."""


class Origin(NamedTuple):
    """A call of the head.

    Attributes:
        source: the head's input, of shape (..., width).
        slices: the number of slices.
        deferral: that of the stage, whose layers are plain ones while a slice is computed.
    """

    source: Tensor
    slices: int
    deferral: Deferral | None


class Sliced(Tensor):
    """A tensor of shape (*lead, *sample.shape[1:]).

    Args:
        origin: the call of the head from which it follows.
        lead: the dimensions of the tokens.
        sample: none of its rows, as a tensor with no memory in its first dimension; for dtype and shape of a row.
        rows: computes rows.
        inputs: other tensors that want a gradient and from which it follows.
        wants: whether it requires a gradient.
    """

    rules: ClassVar[Mapping[str, Rule]] = MappingProxyType({})  # by names of functions; set by head_rules
    origin: Origin
    lead: tuple[int, ...]
    sample: Tensor
    rows: Rows
    inputs: tuple[Tensor, ...]

    @staticmethod
    def __new__(
        cls,
        origin: Origin,
        lead: Sequence[int],
        sample: Tensor,
        rows: Rows,
        inputs: Iterable[Tensor] = (),
        *,
        wants: bool,
    ) -> Sliced:
        shape = (*lead, *sample.shape[1:])
        wants = wants and torch.is_grad_enabled() and sample.is_floating_point()
        made: Sliced = make_wrapper(cls, shape, dtype=sample.dtype, device=sample.device, requires_grad=wants)
        made.origin, made.lead, made.sample, made.rows = origin, tuple(lead), sample, rows
        made.inputs = tuple({id(each): each for each in inputs}.values())
        return made

    def __init__(self, *_: object, **__: object) -> None:
        super().__init__()

    @classmethod
    def of_input(cls, origin: Origin) -> Sliced:
        """The head's input itself, whose rows are slices of it."""
        source = origin.source
        sample = source.detach().reshape(-1, source.shape[-1])[:0]
        return cls(origin, source.shape[:-1], sample, _rows_of_source, wants=source.requires_grad)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", str(func))
        attribute = getattr(getattr(func, "__self__", None), "__name__", name)
        if (name == "__get__" and attribute in ATTRIBUTES) or name in ATTRIBUTES:
            with without_torch_function():
                return func(*args, **kwargs)
        own = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Sliced)]
        with without_torch_function():
            if any(leaf.grad_fn is not None for leaf in own):
                raise refused("a custom autograd.Function")
        if (rule := cls.rules.get(name)) is not None:
            return rule(func, args, kwargs)
        if any(leaf.has_rows for leaf in own):
            raise refused(attribute)
        args, kwargs = tree_map(lambda leaf: leaf.whole() if isinstance(leaf, Sliced) else leaf, (args, kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's has no types of its own
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        raise refused(str(func))

    @property
    def length(self) -> int:
        """The number of its rows."""
        return torch.Size(self.lead).numel()

    @property
    def has_rows(self) -> bool:
        """True if it has a row for each token; False for one number."""
        return self.sample.dim() > 1

    def total(self) -> Tensor:
        """The sum of all its entries, a scalar tensor with a graph."""
        wants = torch.is_grad_enabled() and _requires_grad(self)
        total: Tensor = _Total.apply(self.rows, self.origin, self.length, wants, self.origin.source, *self.inputs)  # type: ignore[no-untyped-call]  # torch's
        return total.to(self.sample.dtype)

    def whole(self) -> Tensor:
        """All of it, in memory; its backward computes each slice once more."""
        each: Tensor = _Each.apply(self.rows, self.origin, self.length, self.origin.source, *self.inputs)  # type: ignore[no-untyped-call]  # torch's
        return each.unflatten(0, self.lead) if self.lead else each.squeeze(0)


def refused(what: str) -> UsageError:
    """The error for something that is done with logits that are computed by slices."""
    return UsageError(
        "head_slices computes the logits for a few tokens at a time, so everything between the head and the loss must "
        f"be known to act on each token alone, and {what} is not: compute the loss of logits (..., vocabulary) with "
        "torch.nn.functional.cross_entropy, or leave head_slices out"
    )


def in_memory(leaf: object) -> object:
    """A leaf of an output; if it is a Sliced, all of it in memory, without a graph."""
    if not isinstance(leaf, Sliced):
        return leaf
    with torch.no_grad():
        return leaf.whole()


def without_memory(leaf: object) -> object:
    """A leaf of an output; in place of a Sliced, a tensor of its shape on the meta device."""
    if not isinstance(leaf, Sliced):
        return leaf
    return torch.empty(leaf.shape, dtype=leaf.dtype, device="meta").requires_grad_(leaf.requires_grad)


def sources(leaf: Tensor) -> list[Tensor]:
    """What a leaf of an output follows from: the input and the parameters of the head for a Sliced, else itself."""
    return [leaf.origin.source, *leaf.inputs] if isinstance(leaf, Sliced) else [leaf]


def _requires_grad(tensor: Tensor) -> bool:
    with without_torch_function():
        return tensor.requires_grad


class Part:
    """The computation of one slice. It computes each row once.

    Args:
        origin: the call of the head.
        wants: whether the gradient of the head's input is wanted.
    """

    def __init__(self, origin: Origin, *, wants: bool) -> None:
        source = origin.source.detach()
        self._source, self._wants = source.reshape(-1, source.shape[-1]), wants
        self._known: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}  # with the positions, which keep their ids
        self.leaves: list[tuple[Tensor, Tensor]] = []  # rows of the head's input, after their positions

    def of(self, sliced: Sliced, positions: Tensor) -> Tensor:
        """The rows at these positions."""
        key = id(sliced), id(positions)
        if key not in self._known:
            self._known[key] = sliced.rows(positions, self), positions
        return self._known[key][0]

    def forget(self) -> None:
        """Leaves the rows to the graph, so that each is freed as soon as the backward has used it."""
        self._known.clear()

    def source(self, positions: Tensor) -> Tensor:
        """Rows of the head's input, as a leaf."""
        leaf = self._source.index_select(0, positions)
        if self._wants:
            self.leaves.append((positions, leaf.requires_grad_()))
        return leaf


class Samples:
    """Takes the place of a Part to compute no rows, which have the dtype and the shape of all."""

    def of(self, sliced: Sliced, positions: Tensor) -> Tensor:
        """No rows of it, whatever the positions."""
        return sliced.sample


def _rows_of_source(positions: Tensor, part: Part) -> Tensor:
    return part.source(positions)


def applied(
    func: Callable[..., Tensor], args: object, kwargs: object, like: Sliced, inputs: Iterable[Tensor] = ()
) -> Sliced:
    """What a function makes of rows: as many as it is given.

    Args:
        func: the function.
        args, kwargs: its arguments, of which Sliced and PerToken are replaced by rows; other tensors are the same for
            each token.
        like: one of the arguments, which has the same tokens.
        inputs: other tensors that want a gradient, such as the parameters of a module.
    """
    leaves, spec = tree_flatten((args, kwargs))
    tensors = [leaf.flat if isinstance(leaf, PerToken) else leaf for leaf in leaves]
    own = [leaf for leaf in tensors if isinstance(leaf, Sliced)]
    given = [leaf for leaf in (*tensors, *inputs) if isinstance(leaf, Tensor) and not isinstance(leaf, Sliced)]
    others = [each for each in given if each.requires_grad]
    others += [each for leaf in own for each in leaf.inputs]
    kind = like.sample.device.type
    region = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind), torch.is_autocast_cache_enabled()

    def rows(positions: Tensor, part: Any) -> Tensor:
        def row(leaf: Any) -> Any:
            if isinstance(leaf, Sliced):
                return part.of(leaf, positions)
            return leaf.flat.index_select(0, positions) if isinstance(leaf, PerToken) else leaf

        arguments, keywords = tree_unflatten([row(leaf) for leaf in leaves], spec)
        enabled, dtype, caches = region
        with torch.autocast(kind, dtype, enabled=enabled, cache_enabled=caches):
            found: Tensor = func(*arguments, **keywords)
            return found

    with torch.no_grad():
        sample = rows(torch.empty(0, dtype=torch.long, device=like.sample.device), Samples())
    return Sliced(
        like.origin, like.lead, sample, rows, others, wants=bool(others) or any(_requires_grad(leaf) for leaf in own)
    )


class PerToken:
    """A tensor in memory with an entry or a row for each token.

    Args:
        flat: the tensor, with the tokens as its first dimension.
    """

    def __init__(self, flat: Tensor) -> None:
        self.flat = flat


def moved(sliced: Sliced, index: Tensor) -> Sliced:
    """A Sliced whose rows are those of another one: `index` has their positions there, in its own shape."""
    flat = index.reshape(-1)
    ordered = len(flat) == sliced.length and torch.equal(flat, _positions(sliced.length, flat.device))

    def rows(positions: Tensor, part: Any) -> Tensor:
        found: Tensor = part.of(sliced, positions if ordered else flat.index_select(0, positions))
        return found

    return Sliced(sliced.origin, index.shape, sliced.sample, rows, sliced.inputs, wants=_requires_grad(sliced))


def _positions(length: int, device: torch.device) -> Tensor:
    return torch.arange(length, device=device)


def _slices(origin: Origin, length: int) -> Iterator[Tensor]:
    """The positions of each slice; their numbers differ by one at most."""
    positions = _positions(length, origin.source.device)
    yield from positions.tensor_split(max(1, min(origin.slices, length)))


@contextmanager
def _plain(origin: Origin, *, grads: bool) -> Iterator[None]:
    """Inside the `with` block, layers are the plain ones, and autograd keeps what it saves itself."""
    deferral = origin.deferral
    active = deferral is not None and deferral.active
    if deferral is not None:
        deferral.active = False
    try:
        with torch.set_grad_enabled(grads), saved_tensors_hooks(_same, _same):
            yield
    finally:
        if deferral is not None:
            deferral.active = active


def _same(tensor: Tensor) -> Tensor:
    return tensor


class _Sums:
    """Adds up gradients of slices: of the head's input by positions, and of other tensors, in float32 at least."""

    def __init__(self, source: Tensor, inputs: Sequence[Tensor], wanted: Sequence[bool]) -> None:
        self._source = source
        self._inputs = [each for each, wants in zip(inputs, wanted[1:], strict=True) if wants]
        self._wanted = wanted
        self._of_source = source.new_zeros(source.numel() // source.shape[-1], source.shape[-1]) if wanted[0] else None
        self._found: list[Tensor | None] = [None] * len(self._inputs)

    def add(self, part: Part, output: Tensor, gradient: Tensor | None = None) -> None:
        """Adds the gradients of what a part computed, which forgets its rows."""
        part.forget()
        if not output.requires_grad:
            return
        starts = [leaf for _, leaf in part.leaves]
        found = torch.autograd.grad(output, [*starts, *self._inputs], gradient, allow_unused=True)
        for (positions, _), each in zip(part.leaves, found, strict=False):
            if each is not None and self._of_source is not None:
                self._of_source.index_add_(0, positions, each)
        for index, each in enumerate(found[len(starts) :]):
            if each is not None:
                before = self._found[index]
                self._found[index] = each.to(_wide(each.dtype)) if before is None else before.add_(each)

    def gradients(self) -> list[Tensor | None]:
        """Those of the source and of all inputs; None where there is none."""
        found = iter(self._found)
        own = None if self._of_source is None else self._of_source.view(self._source.shape)
        return [own, *(next(found) if wants else None for wants in self._wanted[1:])]


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


class _Total(Function):
    """The sum over slices. The forward computes the gradients, too, so that the head is computed once."""

    @staticmethod
    def forward(
        ctx: Any, rows: Rows, origin: Origin, length: int, wants: bool, source: Tensor, *inputs: Tensor
    ) -> Tensor:
        wanted = [wants and each.requires_grad for each in (source, *inputs)]
        sums, total = _Sums(source, inputs, wanted), None
        for positions in _slices(origin, length):
            part = Part(origin, wants=wanted[0])
            with _plain(origin, grads=any(wanted)):
                each = rows(positions, part)
                value = each.sum(dtype=_wide(each.dtype) if each.is_floating_point() else None)
                sums.add(part, value)
            total = value.detach() if total is None else total + value.detach()
            del part, each, value
        ctx.found, ctx.dtypes = sums.gradients(), [each.dtype for each in (source, *inputs)]
        assert total is not None
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        found, ctx.found = ctx.found, None
        if found is None:
            raise UsageError("a loss with head_slices has one backward: the gradients of its slices are used up")
        scaled = [
            None if each is None else each.mul_(gradient).to(dtype)
            for each, dtype in zip(found, ctx.dtypes, strict=True)
        ]
        return None, None, None, None, *scaled


class _Each(Function):
    """The rows of all slices. The backward computes each slice again."""

    @staticmethod
    def forward(ctx: Any, rows: Rows, origin: Origin, length: int, source: Tensor, *inputs: Tensor) -> Tensor:
        found = []
        for positions in _slices(origin, length):
            with _plain(origin, grads=False):
                found.append(rows(positions, Part(origin, wants=False)))
        ctx.given = rows, origin, length, (source, *inputs)
        return torch.cat(found)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        rows, origin, length, given = ctx.given
        sums = _Sums(given[0], given[1:], ctx.needs_input_grad[3:])
        for positions in _slices(origin, length):
            part = Part(origin, wants=ctx.needs_input_grad[3])
            with _plain(origin, grads=True):
                sums.add(part, rows(positions, part), gradient.index_select(0, positions))
            del part
        found = [
            None if each is None else each.to(its.dtype) for each, its in zip(sums.gradients(), given, strict=True)
        ]
        return None, None, None, *found
