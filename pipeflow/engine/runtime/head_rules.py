"""Rules of functions that act on each token alone: what they make of a Sliced. A function without a rule is refused.
Must not contain: how slices are computed.
"""

from __future__ import annotations

from functools import partial
from inspect import signature
from typing import Any

import torch
from torch import Tensor

from pipeflow.engine.runtime.head_logits import PerToken, Sliced, applied, moved, refused
from pipeflow.engine.torch_private.trees import tree_leaves, tree_map

Args = tuple[Any, ...]
Keywords = dict[str, Any]

POINTWISE = (
    "float double half bfloat16 neg __neg__ abs __abs__ exp log sqrt rsqrt square tanh sigmoid relu "
    "gelu silu softplus logsigmoid clamp clamp_min clamp_max clip nan_to_num contiguous clone detach add __add__ "
    "__radd__ sub __sub__ __rsub__ rsub mul __mul__ __rmul__ div true_divide __truediv__ __rtruediv__ __div__ pow "
    "__pow__ minimum maximum where masked_fill"
)
ELEMENT_LOSSES = "mse_loss l1_loss smooth_l1_loss huber_loss kl_div binary_cross_entropy_with_logits"
OF_ROWS = "softmax log_softmax logsumexp sum mean amax amin"
PRODUCTS = "linear matmul __matmul__ layer_norm rms_norm"
RESHAPES = "view reshape flatten unflatten squeeze unsqueeze"
ORDERS = "transpose permute movedim swapaxes"
PER_TOKEN = "gather split_losses"


def _name(func: Any) -> str:
    return str(getattr(func, "__name__", func))


def _first(args: Args, kwargs: Keywords) -> Sliced:
    found: Sliced = next(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Sliced))
    return found


def _own(func: Any, args: Args, kwargs: Keywords) -> Sliced:
    """The first argument. Raises UsageError if it is not the only Sliced."""
    found: list[Sliced] = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Sliced)]
    if len(found) != 1 or not args or args[0] is not found[0]:
        raise refused(f"{_name(func)} of these arguments")
    own: Sliced = found[0]
    return own


def _pointwise(func: Any, args: Args, kwargs: Keywords) -> Any:
    like = _first(args, kwargs)
    positional, named = tree_map(partial(_broadcast, func, like), (args, kwargs))
    found: Sliced = applied(func, positional, named, like)
    return found


def _converted(func: Any, args: Args, kwargs: Keywords) -> Any:
    own, *rest = args
    if not isinstance(own, Sliced):
        return func(own, *(each.sample if isinstance(each, Sliced) else each for each in rest), **kwargs)
    like = [each.new_empty(()) if isinstance(each, Tensor) else each for each in rest]
    return applied(func, (own, *like), kwargs, own)


def _requiring_grad(func: Any, args: Args, kwargs: Keywords) -> Any:
    own = _own(func, args, kwargs)
    return own if own.requires_grad else own + torch.zeros((), dtype=own.dtype, device=own.device, requires_grad=True)


def _broadcast(func: Any, like: Sliced, leaf: Any) -> Any:
    """An argument of a function that computes each entry alone, as it is for rows."""
    if not isinstance(leaf, Tensor):
        return leaf
    why = f"{_name(func)} with a tensor of shape {tuple(leaf.shape)}"
    if isinstance(leaf, Sliced):
        if leaf.lead != like.lead or leaf.has_rows != like.has_rows or leaf.origin is not like.origin:
            raise refused(why)
        return leaf
    width = int(like.has_rows)
    if leaf.dim() > len(like.lead) + width:
        raise refused(why)
    last = leaf.shape[leaf.dim() - width :] if leaf.dim() else ()
    lead = leaf.shape[: leaf.dim() - len(last)]
    if all(size == 1 for size in lead):
        return leaf.reshape(last)
    try:
        return PerToken(leaf.expand(*like.lead, *last).reshape(like.length, *last))
    except RuntimeError:
        raise refused(why) from None


def _element_loss(func: Any, args: Args, kwargs: Keywords) -> Any:
    given = _bound(func, args, kwargs)
    reduction = given.pop("reduction", "mean")
    like = _first((), given)
    each = _pointwise(partial(func, reduction="none"), (), given)
    return _reduced(each, reduction, like.lead[0] if reduction == "batchmean" else each.numel())


def _bound(func: Any, args: Args, kwargs: Keywords) -> Keywords:
    """The arguments of a loss by their names, without reductions in an old form. Raises UsageError if it has one."""
    given = dict(signature(func).bind(*args, **kwargs).arguments)
    if given.pop("size_average", None) is not None or given.pop("reduce", None) is not None:
        raise refused(f"{_name(func)} with size_average or reduce")
    return given


def _reduced(each: Sliced, reduction: str, count: Any) -> Any:
    if reduction == "none":
        return each
    return each.total() if reduction == "sum" else each.total() / count


def _class_loss(func: Any, args: Args, kwargs: Keywords) -> Any:
    given = _bound(func, args, kwargs)
    reduction, logits, target = given.pop("reduction", "mean"), given.pop("input"), given.pop("target")
    has_classes = isinstance(logits, Sliced) and logits.has_rows and len(logits.lead) == 1
    if not has_classes or isinstance(target, Sliced) or len(target) != logits.length:
        shapes = f"{tuple(logits.shape)} and {tuple(target.shape)}"
        raise refused(f"{_name(func)} of shapes {shapes}, whose classes are not the last of two dimensions,")
    each = applied(partial(func, reduction="none"), (logits, PerToken(target)), given, logits)
    if reduction != "mean":
        return _reduced(each, reduction, None)
    if target.is_floating_point():
        return each.total() / logits.length
    counts = target != given.get("ignore_index", -100)
    weight = given.get("weight")
    return each.total() / (counts.sum() if weight is None else weight[target[counts]].sum())


def _of_rows(func: Any, args: Args, kwargs: Keywords) -> Any:
    own, name = _own(func, args, kwargs), _name(func)
    rest, given = list(args[1:]), dict(kwargs)
    dim = given.pop("dim") if "dim" in given else rest.pop(0) if rest else None
    dim = dim[0] if isinstance(dim, tuple | list) and len(dim) == 1 else dim
    if dim is None and name in ("sum", "mean") and not rest and not any(given.values()):
        return own.total() if name == "sum" else own.total() / own.numel()
    if not own.has_rows and name != "softmax":
        return func(own.whole(), *args[1:], **kwargs)
    if dim not in (-1, own.dim() - 1) or not own.has_rows:
        raise refused(f"{name} over dimension {dim}")
    return applied(func, (own, -1, *rest), given, own)


def _product(func: Any, args: Args, kwargs: Keywords) -> Any:
    own, name = _own(func, args, kwargs), _name(func)
    if not own.has_rows:
        return func(own.whole(), *args[1:], **kwargs)
    if name.endswith("norm"):
        is_known = len(args[1] if len(args) > 1 else kwargs["normalized_shape"]) == 1
    else:
        other = args[1] if len(args) > 1 else next(iter(kwargs.values()))
        is_known = other.dim() == 2
    if not is_known:
        raise refused(f"{name} of several dimensions")
    return applied(func, args, kwargs, own)


def _per_token(func: Any, args: Args, kwargs: Keywords) -> Any:
    own, name = _own(func, args, kwargs), _name(func)
    rest = args[1:]
    if name == "gather":
        dim = kwargs["dim"] if "dim" in kwargs else rest[0]
        if dim not in (-1, own.dim() - 1) or not own.has_rows:
            raise refused(f"gather along dimension {dim}")
        rest, kwargs = (-1, kwargs.get("index", *rest[1:2])), {}

    def per_token(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or not leaf.dim():
            return leaf
        if leaf.shape[: len(own.lead)] != own.lead:
            raise refused(f"{name} with a tensor of shape {tuple(leaf.shape)}")
        return PerToken(leaf.reshape(own.length, *leaf.shape[len(own.lead) :]))

    return applied(func, (own, *tree_map(per_token, rest)), tree_map(per_token, kwargs), own)


def _index(own: Sliced) -> Tensor:
    """The positions of its rows, in its shape."""
    return torch.arange(own.length, device=own.device).view(own.lead)


def _reshaped(func: Any, args: Args, kwargs: Keywords) -> Any:
    own = _own(func, args, kwargs)
    if len(args) > 1 and isinstance(args[1], torch.dtype):
        raise refused("view with a dtype")
    shape = func(torch.empty(own.shape, device="meta"), *args[1:], **kwargs).shape
    width = own.sample.shape[1:]
    if own.has_rows and width == (1,) and shape == own.lead:
        return applied(partial(torch.squeeze, dim=-1), (own,), {}, own)
    lead = shape[: len(shape) - len(width)]
    if shape[len(lead) :] != width or torch.Size(lead).numel() != own.length:
        raise refused(f"{_name(func)} to the shape {tuple(shape)}")
    return moved(own, _index(own).view(lead))


def _ordered(func: Any, args: Args, kwargs: Keywords) -> Any:
    own = _own(func, args, kwargs)
    index = _index(own)
    if not own.has_rows:
        return moved(own, func(index, *args[1:], **kwargs))
    marked = index.as_strided(own.shape, (*index.stride(), 0))  # by its stride the last dimension is found again
    found = func(marked, *args[1:], **kwargs)
    if found.stride(-1):
        raise refused(f"{_name(func)} of the last dimension")
    return moved(own, found[..., 0])


def _picked(func: Any, args: Args, kwargs: Keywords) -> Any:
    own, key = args
    if not isinstance(own, Sliced) or any(isinstance(leaf, Sliced) for leaf in tree_leaves(key)):
        raise refused("an index")
    keys = list(key) if isinstance(key, tuple) else [key]
    if own.has_rows:
        takes = sum(map(_takes, keys))
        if takes == own.dim() or any(each is Ellipsis for each in keys):
            last = keys.pop()
            is_whole = isinstance(last, slice) and last == slice(None)
            if not is_whole and not (last is Ellipsis and takes < own.dim()):
                raise refused("an index of the last dimension")
    return moved(own, _index(own)[tuple(keys)])


def _takes(key: Any) -> int:
    """The number of dimensions that an entry of an index stands for."""
    if key is None or key is Ellipsis:
        return 0
    return key.dim() if isinstance(key, Tensor) and key.dtype == torch.bool else 1


_TABLE = (
    (POINTWISE, _pointwise),
    ("to type_as", _converted),
    ("requires_grad_", _requiring_grad),
    (ELEMENT_LOSSES, _element_loss),
    ("cross_entropy nll_loss", _class_loss),
    (OF_ROWS, _of_rows),
    (PRODUCTS, _product),
    (PER_TOKEN, _per_token),
    (RESHAPES, _reshaped),
    (ORDERS, _ordered),
    ("__getitem__", _picked),
)
Sliced.rules = {name: rule for names, rule in _TABLE for name in names.split()}
