"""Sliced: a tensor with an entry or a row for each token, which is computed for one slice of the tokens at a time; and
the table of functions that act on each token alone. Must not contain: which module makes one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from inspect import signature
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

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
# Numbers per token are small. A function of them that is not in the table gets all of them, in memory.

Args = tuple[Any, ...]
Keywords = dict[str, Any]
Rows = Callable[[Tensor, "Part"], Tensor]
"""Returns rows: those at some positions, in a Part."""
_ATTRIBUTES = """
    shape dtype device requires_grad ndim layout is_cuda is_meta is_sparse is_nested is_leaf names itemsize size dim
    numel nelement is_floating_point is_complex __len__ __hash__ __repr__ is_contiguous stride get_device
"""
ATTRIBUTES = frozenset(_ATTRIBUTES.split())
"""What may be read of a Sliced, since it needs no values."""
_WIDE = {torch.float16: torch.float32, torch.bfloat16: torch.float32}


class Slicing(NamedTuple):
    """How a head is computed.

    Attributes:
        slices: the number of slices.
        deferral: that of the stage, whose layers are plain ones while a slice is computed.
    """

    slices: int
    deferral: Deferral | None = None

    @contextmanager
    def plain(self) -> Iterator[None]:
        """Inside the `with` block, layers are the plain ones."""
        active = self.deferral is not None and self.deferral.active
        if self.deferral is not None:
            self.deferral.active = False
        try:
            yield
        finally:
            if self.deferral is not None:
                self.deferral.active = active


class Sliced(Tensor):
    """A tensor of shape (*lead, *sample.shape[1:]).

    Args:
        slicing: how it is computed.
        lead: the dimensions of the tokens.
        sample: none of its rows, as a tensor with no memory in its first dimension; for dtype and shape of a row.
        rows: computes rows.
        inputs: the tensors in memory from which it follows.
    """

    slicing: Slicing
    lead: tuple[int, ...]
    sample: Tensor
    rows: Rows
    inputs: tuple[Tensor, ...]  # those that want a gradient

    @staticmethod
    def __new__(
        cls, slicing: Slicing, lead: Sequence[int], sample: Tensor, rows: Rows, inputs: Iterable[Tensor]
    ) -> Sliced:
        wanting = {id(each): each for each in inputs if each.requires_grad} if torch.is_grad_enabled() else {}
        look: Any = {"dtype": sample.dtype, "device": sample.device}
        wants = bool(wanting) and sample.is_floating_point()
        made: Sliced = make_wrapper(cls, (*lead, *sample.shape[1:]), requires_grad=wants, **look)
        made.slicing, made.lead, made.sample, made.rows = slicing, tuple(lead), sample, rows
        made.inputs = tuple(wanting.values())
        return made

    @classmethod
    def of(cls, slicing: Slicing, tensor: Tensor, dims: int) -> Sliced:
        """A tensor in memory, whose first `dims` dimensions are those of the tokens."""
        lead = tensor.shape[:dims]
        flat = tensor.reshape(lead.numel(), *tensor.shape[dims:])  # another tensor, which has no hooks

        def rows(positions: Tensor, part: Part) -> Tensor:
            found: Tensor = part.of(flat).index_select(0, positions)
            return found

        return cls(slicing, lead, flat.detach()[:0], rows, [flat])

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Args = (), kwargs: Keywords | None = None) -> Any:
        kwargs, name = kwargs or {}, _name(func)
        attribute = getattr(getattr(func, "__self__", None), "__name__", name)
        if (name == "__get__" and attribute in ATTRIBUTES) or name in ATTRIBUTES:
            with without_torch_function():
                return func(*args, **kwargs)
        own = _sliced(args, kwargs)
        with without_torch_function():
            if any(leaf.grad_fn is not None for leaf in own):
                raise refused("a custom autograd.Function")
        try:
            if name not in RULES:
                raise refused(attribute)
            return RULES[name](func, args, kwargs)
        except UsageError:
            if any(leaf.has_rows for leaf in own):
                raise
        args, kwargs = tree_map(lambda leaf: leaf.whole() if isinstance(leaf, Sliced) else leaf, (args, kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's has no types of its own
        cls, func: Any, types: Any, args: Args = (), kwargs: Keywords | None = None
    ) -> Any:
        raise refused(str(func))

    @property
    def has_rows(self) -> bool:
        """True if it has a row for each token; False for one number."""
        return self.sample.dim() > 1

    def positions(self) -> Tensor:
        """The positions of its rows, of shape `lead`."""
        return torch.arange(torch.Size(self.lead).numel(), device=self.device).view(self.lead)

    def parts(self) -> Sequence[Tensor]:
        """The positions of each slice; their numbers differ by one at most."""
        flat = self.positions().view(-1)
        return flat.tensor_split(max(1, min(self.slicing.slices, len(flat))))

    def total(self) -> Tensor:
        """The sum of all its entries, a scalar tensor with a graph."""
        inputs = self.inputs if torch.is_grad_enabled() else ()
        if any(each._backward_hooks for each in inputs):
            raise UsageError(
                "head_slices: a weight of the head has hooks, which would see the gradient of each slice, and then "
                "that of all: remove them, or leave head_slices out"
            )
        total: Tensor = _Total.apply((self,), *inputs)  # type: ignore[no-untyped-call]  # torch's
        return total.to(self.sample.dtype)

    def whole(self) -> Tensor:
        """All of it, in memory; its backward computes each slice once more."""

        def computed(positions: Tensor) -> Tensor:
            with self.slicing.plain():
                found: Tensor = Part({}).of(self, positions)
                return found

        options: Any = {"use_reentrant": False, "preserve_rng_state": False}
        each = torch.cat([checkpoint(computed, positions, **options) for positions in self.parts()])
        return each.unflatten(0, self.lead) if self.lead else each.squeeze(0)


class Part:
    """The computation of one slice. It computes each row once.

    Args:
        starts: tensors at which its graph begins, by the ids of those that they stand for. None: no rows are computed,
            which have the dtype and the shape of all.
    """

    def __init__(self, starts: Mapping[int, Tensor] | None) -> None:
        self._starts = starts
        self._known: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}  # with the positions, which keep their ids

    def of(self, given: Any, positions: Tensor | None = None) -> Any:
        """What an argument of a function is in it: for a Sliced, the rows at these positions."""
        if not isinstance(given, Sliced):
            return (self._starts or {}).get(id(given), given)
        if self._starts is None or positions is None:
            return given.sample
        key = id(given.rows), id(positions)
        if key not in self._known:
            self._known[key] = given.rows(positions, self), positions
        return self._known[key][0]

    def forget(self) -> None:
        """Leaves the rows to the graph, so that each is freed as soon as the backward has used it."""
        self._known.clear()


class _Total(Function):
    """The sum over slices. The forward computes the gradients, too, so that the head is computed once."""

    @staticmethod
    def forward(ctx: Any, given: tuple[Sliced], *inputs: Tensor) -> Tensor:
        (own,), sums = given, dict[int, Tensor]()
        total: Tensor | None = None
        cut = {id(each): each.detach().requires_grad_() for each in inputs if not each.is_leaf}
        wanted = [cut.get(id(each), each) for each in inputs]  # else a gradient would also come from before the head
        for positions in own.parts():
            part, found = Part(cut), list[Tensor | None]()
            # autograd keeps what it saves itself, whatever hooks the stage has
            with own.slicing.plain(), torch.set_grad_enabled(bool(inputs)), saved_tensors_hooks(_same, _same):
                value = part.of(own, positions)
                value = value.sum(dtype=_WIDE.get(value.dtype))
                part.forget()
                if value.requires_grad:
                    found = [*torch.autograd.grad(value, wanted, allow_unused=True)]
            for index, each in enumerate(found):
                if each is not None:  # those of weights are added up in float32 at least
                    dtype = _WIDE.get(each.dtype, each.dtype) if inputs[index].is_leaf else each.dtype
                    sums[index] = sums[index].add_(each) if index in sums else each.to(dtype, copy=True)
            total = value.detach() if total is None else total + value.detach()
            del part, value, found
        ctx.sums, ctx.dtypes = sums, [each.dtype for each in inputs]
        assert total is not None
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        sums, ctx.sums = ctx.sums, None
        if sums is None:
            raise UsageError("a loss with head_slices has one backward: the gradients of its slices are used up")
        dtypes = enumerate(ctx.dtypes)
        return None, *(sums[index].mul_(gradient).to(dtype) if index in sums else None for index, dtype in dtypes)


def _same(tensor: Tensor) -> Tensor:
    return tensor


def refused(what: str) -> UsageError:
    """The error for something that is done with logits that are computed by slices."""
    return UsageError(
        "head_slices computes the logits for a few tokens at a time, so everything between the head and the loss must "
        f"be known to act on each token alone, and {what} is not: compute the loss of logits (..., vocabulary) with "
        "torch.nn.functional.cross_entropy, or leave head_slices out"
    )


def in_memory(leaf: object) -> object:
    """A leaf of an output; if it is a Sliced, all of it in memory, without a graph."""
    with torch.no_grad():
        return leaf.whole() if isinstance(leaf, Sliced) else leaf


def without_memory(leaf: object) -> object:
    """A leaf of an output; in place of a Sliced, a tensor of its shape on the meta device."""
    if not isinstance(leaf, Sliced):
        return leaf
    return torch.empty(leaf.shape, dtype=leaf.dtype, device="meta").requires_grad_(leaf.requires_grad)


def sources(leaf: Tensor) -> Sequence[Tensor]:
    """What a leaf of an output follows from: the input and the parameters of the head for a Sliced, else itself."""
    return leaf.inputs if isinstance(leaf, Sliced) else [leaf]


def applied(
    func: Callable[..., Tensor], args: object, kwargs: object, like: Sliced, inputs: Iterable[Tensor] = ()
) -> Sliced:
    """What a function makes of rows: as many as it is given.

    Args:
        func: the function.
        args, kwargs: its arguments, in which rows replace each Sliced; other tensors are the same for each token.
        like: one of the arguments, which has the same tokens.
        inputs: other tensors from which the rows follow, such as the parameters of a module.
    """
    leaves, spec = tree_flatten((args, kwargs))
    kind, grads = like.sample.device.type, torch.is_grad_enabled()
    enabled, dtype = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
    caches = torch.is_autocast_cache_enabled()

    def rows(positions: Tensor, part: Part) -> Tensor:
        arguments, keywords = tree_unflatten([part.of(leaf, positions) for leaf in leaves], spec)
        is_graph = grads and torch.is_grad_enabled()
        with torch.autocast(kind, dtype, enabled=enabled, cache_enabled=caches), torch.set_grad_enabled(is_graph):
            return func(*arguments, **keywords)

    with torch.no_grad():
        sample = rows(like.positions(), Part(None))
    if sample.shape[:1] != (0,):
        raise refused(f"{_name(func)} of these arguments")
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    own = [each for leaf in tensors for each in sources(leaf)]
    return Sliced(like.slicing, like.lead, sample, rows, [*own, *inputs])


def moved(own: Sliced, index: Tensor) -> Sliced:
    """A Sliced whose rows are those of another one: `index` has their positions there, in its own shape."""

    def rows(positions: Tensor, part: Part) -> Tensor:
        found: Tensor = part.of(own, index.reshape(-1).index_select(0, positions))
        return found

    return Sliced(own.slicing, index.shape, own.sample, rows, own.inputs)


def _name(func: Any) -> str:
    return str(getattr(getattr(func, "func", func), "__name__", func))  # a partial has the name of its function


def _sliced(*arguments: Any) -> list[Sliced]:
    return [leaf for leaf in tree_leaves(arguments) if isinstance(leaf, Sliced)]


def _own(func: Any, args: Args, kwargs: Keywords) -> Sliced:
    """The first argument. Raises UsageError if it is not the only Sliced."""
    found = _sliced(args, kwargs)
    if len(found) != 1 or not args or args[0] is not found[0]:
        raise refused(f"{_name(func)} of these arguments")
    own: Sliced = found[0]
    return own


def _broadcast(func: Any, args: Args, kwargs: Keywords) -> Any:
    """Of a function that computes each entry alone."""
    like = _sliced(args, kwargs)[0]

    def aligned(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        why = refused(f"{_name(func)} with a tensor of shape {tuple(leaf.shape)}")
        if isinstance(leaf, Sliced):
            if (leaf.lead, leaf.has_rows) != (like.lead, like.has_rows):
                raise why
            return leaf
        last = leaf.shape[max(leaf.dim() - like.has_rows, 0) :]
        try:
            each = leaf.expand(*like.lead, *last)
        except RuntimeError:
            raise why from None
        is_shared = leaf.shape[: leaf.dim() - len(last)].numel() == 1
        return leaf.reshape(last) if is_shared else Sliced.of(like.slicing, each, len(like.lead))

    positional, named = tree_map(aligned, (args, kwargs))
    return applied(func, positional, named, like)


def _converted(func: Any, args: Args, kwargs: Keywords) -> Any:
    own, *rest = args
    rest = [torch.empty((), dtype=it.dtype, device=it.device) if isinstance(it, Tensor) else it for it in rest]
    return applied(func, (own, *rest), kwargs, own) if isinstance(own, Sliced) else func(own, *rest, **kwargs)


def _requiring_grad(func: Any, args: Args, kwargs: Keywords) -> Any:
    own = _own(func, args, kwargs)
    return own if own.requires_grad else own + torch.zeros((), dtype=own.dtype, device=own.device, requires_grad=True)


def _of_tokens(func: Any, args: Args, kwargs: Keywords) -> Any:
    """Of a function whose other tensors have an entry or a row for each token."""
    own = _own(func, args, kwargs)

    def aligned(leaf: Any) -> Any:
        if leaf is own or not isinstance(leaf, Tensor):
            return leaf
        if leaf.shape[: len(own.lead)] != own.lead:
            raise refused(f"{_name(func)} with a tensor of shape {tuple(leaf.shape)}")
        return Sliced.of(own.slicing, leaf, len(own.lead))

    positional, named = tree_map(aligned, (args, kwargs))
    return applied(func, positional, named, own)


def _over_last(func: Any, args: Args, kwargs: Keywords) -> Any:
    """Of a function over one dimension, which must be the last."""
    own, name = _own(func, args, kwargs), _name(func)
    rest, given = list(args[1:]), dict(kwargs)
    dim = given.pop("dim") if "dim" in given else rest.pop(0) if rest else None
    dim = dim[0] if isinstance(dim, tuple | list) and len(dim) == 1 else dim
    if dim is None and name in ("sum", "mean") and not rest and not any(given.values()):
        return own.total() if name == "sum" else own.total() / own.numel()
    if dim not in (-1, own.dim() - 1) or not own.has_rows:
        raise refused(f"{name} over dimension {dim}")
    return _of_tokens(func, (own, -1, *rest), given)


def _product(func: Any, args: Args, kwargs: Keywords) -> Any:
    """Of rows and a matrix, and norms of rows."""
    own = _own(func, args, kwargs)
    try:
        return applied(func, args, kwargs, own)
    except RuntimeError as error:
        raise refused(f"{_name(func)} of several dimensions") from error


def _loss(func: Any, args: Args, kwargs: Keywords) -> Any:
    given = dict(signature(func).bind(*args, **kwargs).arguments)
    if given.pop("size_average", None) is not None or given.pop("reduce", None) is not None:
        raise refused(f"{_name(func)} with size_average or reduce")
    reduction, losses = given.pop("reduction", "mean"), partial(func, reduction="none")
    if _name(func) in CLASS_LOSSES.split():
        each, count = _class_losses(losses, given)
    else:
        each = _broadcast(losses, (), given)
        count = each.lead[0] if reduction == "batchmean" else each.numel()
    if reduction == "none":
        return each
    return each.total() if reduction == "sum" else each.total() / count


def _class_losses(func: Any, given: Keywords) -> tuple[Sliced, Any]:
    """The loss of each token, and by what their mean is divided."""
    logits, target, weight = given["input"], given["target"], given.get("weight")
    has_classes = isinstance(logits, Sliced) and logits.has_rows and len(logits.lead) == 1
    if not has_classes or isinstance(target, Sliced) or len(target) != len(logits):
        shapes = f"{tuple(logits.shape)} and {tuple(target.shape)}"
        raise refused(f"{_name(func)} of shapes {shapes}, whose classes are not the last of two dimensions,")
    each = applied(func, (), {**given, "target": Sliced.of(logits.slicing, target, 1)}, logits)
    if target.is_floating_point():
        return each, len(logits)
    counts = target != given.get("ignore_index", -100)
    return each, counts.sum() if weight is None else weight[target[counts]].sum()


def _reshaped(func: Any, args: Args, kwargs: Keywords) -> Any:
    own = _own(func, args, kwargs)
    like = func(torch.empty(own.shape, dtype=own.dtype, device="meta"), *args[1:], **kwargs)
    if own.has_rows and own.shape[-1] == 1 and like.shape == own.lead:
        return applied(partial(torch.squeeze, dim=-1), (own,), {}, own)
    lead = like.shape[: like.dim() - own.has_rows]
    if like.dtype != own.dtype or like.shape != (*lead, *own.sample.shape[1:]):
        raise refused(f"{_name(func)} to {like.dtype} of the shape {tuple(like.shape)}")
    return Sliced(own.slicing, lead, own.sample, own.rows, own.inputs)


def _ordered(func: Any, args: Args, kwargs: Keywords) -> Any:
    own = _own(func, args, kwargs)
    index = own.positions()  # by its stride the last dimension is found again
    index = func(index.as_strided(own.shape, (*index.stride(), 0)[: own.dim()]), *args[1:], **kwargs)
    if own.has_rows and index.stride(-1):
        raise refused(f"{_name(func)} of the last dimension")
    return moved(own, index[..., 0] if own.has_rows else index)


def _picked(func: Any, args: Args, kwargs: Keywords) -> Any:
    own = _own(func, args, kwargs)
    keys = list(args[1]) if isinstance(args[1], tuple) else [args[1]]
    if own.has_rows and keys and isinstance(keys[-1], slice) and keys[-1] == slice(None):
        keys.pop()  # all of the last dimension
    elif own.has_rows and any(each is Ellipsis for each in keys[:-1]):
        raise refused("an index of the last dimension")
    try:
        return moved(own, own.positions()[tuple(keys)])
    except IndexError as error:
        raise refused("an index of the last dimension") from error


POINTWISE = (
    "float double half bfloat16 neg __neg__ abs __abs__ exp log sqrt rsqrt square tanh sigmoid relu "
    "gelu silu softplus logsigmoid clamp clamp_min clamp_max clip nan_to_num contiguous clone detach add __add__ "
    "__radd__ sub __sub__ __rsub__ rsub mul __mul__ __rmul__ div true_divide __truediv__ __rtruediv__ __div__ pow "
    "__pow__ minimum maximum where masked_fill"
)
CLASS_LOSSES = "cross_entropy nll_loss"
ELEMENT_LOSSES = "mse_loss l1_loss smooth_l1_loss huber_loss kl_div binary_cross_entropy_with_logits"
RULES: dict[str, Callable[[Any, Args, Keywords], Any]] = {
    name: rule
    for names, rule in (
        (POINTWISE, _broadcast),
        ("to type_as", _converted),
        ("requires_grad_", _requiring_grad),
        (f"{CLASS_LOSSES} {ELEMENT_LOSSES}", _loss),
        ("softmax log_softmax logsumexp sum mean amax amin gather", _over_last),
        ("linear matmul __matmul__ layer_norm rms_norm", _product),
        ("split_losses", _of_tokens),
        ("view reshape flatten unflatten squeeze unsqueeze", _reshaped),
        ("transpose permute movedim swapaxes", _ordered),
        ("__getitem__", _picked),
    )
    for name in names.split()
}
"""What each function that acts on each token alone makes of Sliced arguments."""
