"""Term rules: what each operator that is not pointwise makes of samples. An operator without a rule is an error. Must
not contain: operators on sums over samples, which must be linear in them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from pipeflow.engine.stages.tape import BATCH_NORMS, TapeNode
from pipeflow.engine.stages.values import (
    ONE,
    Factor,
    Known,
    Rows,
    Same,
    SampleAxis,
    Term,
    TermSum,
    UnprovedError,
    Value,
    Values,
    aligned,
    dims_of,
    mixes,
    over,
    terms_of,
    times,
    without,
)

if TYPE_CHECKING:
    from pipeflow.engine.stages.terms import Reading

Rule = Callable[["Reading", TapeNode, Values], Value]
_MASKS = (torch.bool, torch.uint8)


def _only(node: TapeNode, values: Values, name: str = "self") -> tuple[TapeNode, Rows]:
    """An argument that has samples. Raises UnprovedError if it is a sum over them."""
    of = node.argument(name)
    value = values[of]
    if not isinstance(value, Rows):
        raise UnprovedError(f"{node.name} of a sum over samples is no sum over samples")
    return of, value


def _sum(reading: Reading, node: TapeNode, values: Values) -> Value:
    of = node.argument("self")
    value = values[of]
    if node.name == "count_nonzero":
        _, rows = _only(node, values)
        value = Rows(rows.axis, reading.plain(rows, node))
    is_mean, keepdim = node.name == "mean", bool(node.argument("keepdim"))
    return reading.reduced(node, value, of, dims_of(node, "dim", of), is_mean=is_mean, keepdim=keepdim)


def _reduction(reading: Reading, node: TapeNode, values: Values) -> Value:
    """A reduction that is no sum: of other dimensions than that of the samples."""
    of, value = _only(node, values)
    dims = dims_of(node, "dim", of)
    if value.axis.dim in dims and node.name in ("any", "all") and node.is_known and not node.shape:
        counted = Factor("total", (node, ONE))  # of the microbatches for which it is true
        return Known(
            Factor("some", (counted,)) if node.name == "any" else Factor("each", (counted, Factor("entries", (1,))))
        )
    if value.axis.dim in dims:
        raise UnprovedError(f"{node.name} over all samples is no sum over samples")
    return Rows(without(value.axis, dims, keepdim=bool(node.argument("keepdim"))), reading.plain(value, node))


def _along(reading: Reading, node: TapeNode, values: Values) -> Value:
    """An operator along one dimension, which keeps the shape or shortens this dimension."""
    of, value = _only(node, values)
    if value.axis.dim in dims_of(node, "dim", of):
        raise mixes(f"{node.name} along the samples")
    return Rows(value.axis, reading.plain(value, node))


def _normalized(reading: Reading, node: TapeNode, values: Values) -> Value:
    """A normalization over the last dimensions."""
    of, value = _only(node, values, "input")
    if value.axis.dim >= len(of.shape) - len(node.argument("normalized_shape")):
        raise mixes(node.name)
    return Rows(value.axis, reading.plain(value, node))


def _batched(reading: Reading, node: TapeNode, values: Values) -> Value:
    """An operator of layers whose first dimension has the samples, in all its arguments that have any."""
    is_alone = "convolution" in node.name or "norm" in node.name
    found: set[tuple[SampleAxis, int]] = set()
    for each, value in values.items():
        if isinstance(value, TermSum | Known) or (isinstance(value, Rows) and (value.axis.dim or (is_alone and found))):
            raise mixes(node.name)
        if isinstance(value, Rows):
            reading.plain(value, node)
            found.add((value.axis, each.shape[0]))
    if len(found) != 1 or (is_alone and not isinstance(values[node.args[0]], Rows)):
        raise mixes(node.name)
    [(axis, size)] = found
    if not node.shape or node.shape[0] != size:
        raise mixes(node.name)
    return Rows(axis)


_FACTORS = {"mm": ("self", "mat2"), "bmm": ("self", "mat2"), "mv": ("self", "vec"), "dot": ("self", "tensor")}
_FACTORS |= {"addmm": ("mat1", "mat2"), "baddbmm": ("batch1", "batch2")}


def _product(reading: Reading, node: TapeNode, values: Values) -> Value:
    """A product of matrices."""
    one, other = (node.argument(each) for each in _FACTORS[node.name])
    mine = [(each, values[each]) for each in (one, other)]
    if any(isinstance(value, TermSum | Known) for value in values.values()):
        raise UnprovedError(f"{node.name} of a sum over samples")
    axes = [value.axis for _, value in mine if isinstance(value, Rows)]
    if not axes or not axes[0].alike(axes[-1]):
        raise mixes(node.name)
    first, second = (value.axis.dim if isinstance(value, Rows) else None for _, value in mine)
    inner = len(one.shape) - 1, max(len(other.shape) - 2, 0)
    if first == inner[0] and second == inner[1] and node.name in ("mm", "bmm", "dot", "mv"):
        return reading.summed(node, times(*(value.factor for _, value in mine if isinstance(value, Rows))))
    if first == inner[0] or second == inner[1]:
        raise mixes(node.name)
    for (each, value), dim in zip(mine, (first, second), strict=True):
        if isinstance(value, Same) and value.varies and len(each.shape) == 3 and 0 in (first, second):
            raise mixes(node.name)
        if isinstance(value, Rows):
            reading.plain(value, node)
            found = value.axis, dim
    if first is not None and second is not None and not (first == second == 0 and len(one.shape) == 3):
        raise mixes(node.name)
    axis, dim = found
    if first is None:
        axis = axis.at(len(node.shape) - 1 if dim == len(other.shape) - 1 else axis.dim)
    if "add" in node.name:
        _added(reading, node, values, axis)
    return Rows(axis)


def _added(reading: Reading, node: TapeNode, values: Values, axis: SampleAxis) -> None:
    """Raises UnprovedError if what is added to a product of matrices, with samples along `axis`, mixes them."""
    added = node.argument("self")
    value, dim = values[added], axis.dim - len(node.shape) + len(added.shape)
    if isinstance(value, Rows):
        reading.plain(value, node)
        if aligned([(value.axis, added)], node.shape, node.name) != axis:
            raise mixes(node.name)
    elif isinstance(value, Same) and value.varies and dim >= 0 and added.shape[dim] > 1:
        raise mixes(node.name)
    reading.fix([reading.number(each) for name in ("alpha", "beta") if (each := node.argument(name)) != 1])


def _nll(reading: Reading, node: TapeNode, values: Values) -> Value:
    """The negative log likelihood of targets, some of which do not count."""
    target, weight = node.argument("target"), node.argument("weight")
    _, value = _only(node, values)
    its = values[target]
    if its == Same():  # each sample has the same target
        return _per_sample(reading, node, values)
    if node.index:
        raise UnprovedError("the total weight of a loss is used")
    if weight is not None and not isinstance(values[weight], Same):
        raise UnprovedError("the weights of the classes depend on the batch")
    if not isinstance(its, Rows) or its.axis != value.axis or value.axis.dim == 1 or its.factor != ONE:
        raise mixes("the loss of targets that number samples")
    if node.argument("reduction") == 0:
        return Rows(value.axis, reading.plain(value, node))
    if node.argument("reduction") == 2:
        return TermSum((Term(value.factor),))
    if not target.is_known:
        raise UnprovedError("the mean is over targets that the model computes, of which some may not count")
    classes = Factor("classes", (target, weight, node.argument("ignore_index")))
    return TermSum((Term(over(value.factor, classes)),))


def _per_sample(reading: Reading, node: TapeNode, values: Values) -> Value:
    """A loss of torch with one entry for each row of scores."""
    of, value = _only(node, values)
    if value.axis.dim or node.index:
        raise mixes(node.name)
    if node.argument("reduction") == 0:
        return Rows(value.axis, reading.plain(value, node))
    dims = [0] if len(of.shape) > 1 else []
    return reading.reduced(node, value, of, dims, is_mean=node.argument("reduction") == 1, keepdim=False)


def _embedding(reading: Reading, node: TapeNode, values: Values) -> Value:
    _, value = _only(node, values, "indices")
    if not isinstance(values[node.argument("weight")], Same):
        raise UnprovedError("a table of the batch's own is looked up")
    return Rows(value.axis, reading.plain(value, node))


def _gather(reading: Reading, node: TapeNode, values: Values) -> Value:
    """Entries that are picked along another dimension than that of the samples."""
    of, index = node.argument("self"), node.argument("index")
    [dim] = dims_of(node, "dim", of)
    mine, its = values[of], values[index]
    axes = {each.axis for each in (mine, its) if isinstance(each, Rows)}
    if len(axes) != 1 or any(isinstance(each, TermSum | Known) for each in (mine, its)):
        raise mixes(node.name)
    if isinstance(mine, Rows) and mine.axis.dim == dim:
        raise mixes(node.name)
    if isinstance(its, Rows) and (its.factor != ONE or (isinstance(mine, Same) and mine.varies and len(of.shape) > 1)):
        raise mixes(node.name)
    return Rows(axes.pop(), mine.factor if isinstance(mine, Rows) else ONE)


def _scatter(reading: Reading, node: TapeNode, values: Values) -> Value:
    """Entries that are set along another dimension than that of the samples."""
    [dim] = dims_of(node, "dim", node.argument("self"))
    given = [each for each in values.values() if isinstance(each, Rows)]
    axes = {each.axis for each in given}
    reading.fix([reading.number(each) for each in node.args[3:]])
    wrong = any(
        isinstance(each, TermSum | Known) or (isinstance(each, Same) and each.varies) for each in values.values()
    )
    if len(axes) != 1 or wrong or any(each.axis.dim == dim or each.factor != ONE for each in given):
        raise mixes(node.name)
    axis = axes.pop()
    if len({each.shape[axis.dim] for each in node.nodes() if each.shape}) > 1:
        raise mixes(node.name)
    return Rows(axis)


def _index(reading: Reading, node: TapeNode, values: Values) -> Value:
    """Entries at places, or where a mask is true."""
    of, value = node.argument("self"), values[node.argument("self")]
    indices = node.argument("indices")
    at = [dim for dim, each in enumerate(indices) if each is not None]
    given = [indices[dim] for dim in at]
    axes = {its.axis for each in given if isinstance(its := values[each], Rows)}
    is_table = isinstance(value, Same) and (not value.varies or all(each.dtype not in _MASKS for each in given))
    if is_table and axes and len(given) == len(indices):  # one that is the same for all microbatches
        if len(axes) > 1 or len({len(each.shape) for each in given}) > 1:
            raise mixes("an index")
        return Rows(axes.pop())
    if not isinstance(value, Rows):
        raise UnprovedError("an index of a sum over samples")
    mask = values[given[0]]
    if len(given) == 1 and given[0].dtype in _MASKS and at[0] == 0 and isinstance(mask, Rows):
        return _picked(value, mask, given[0])
    if value.axis.dim not in at:
        if len(given) == 1 and isinstance(mask, Same):
            return Rows(
                value.axis.at(value.axis.dim + (len(given[0].shape) - 1) * (at[0] < value.axis.dim)), value.factor
            )
        raise mixes("an index")
    place = indices[value.axis.dim]
    if all(_picks_of(each, values) is not None for each in given) and at == list(range(len(given))):
        [*picks] = {_picks_of(each, values) for each in given}
        if len(picks) == 1 and picks[0] is not None and _counts_samples(reading, place, value, of):
            return Rows(SampleAxis(0, picks=picks[0]), reading.plain(value, node))
    others = [each for each in given if each is not place]
    if _numbers_all(place, of.shape[value.axis.dim]) and value.axis.outer == 1 and at == list(range(len(at))):
        axis = replace(value.axis, dim=len(node.shape) - len(of.shape) + len(at) - _rank(given))
        rows = [values[each] for each in others]
        if all(isinstance(each, Rows) and each.axis.alike(value.axis) for each in rows):
            return Rows(replace(axis, dim=_place_of(place, given)), value.factor)
    raise mixes("an index")


def _rank(given: list[TapeNode]) -> int:
    return max(len(each.shape) for each in given)


def _place_of(place: TapeNode, given: list[TapeNode]) -> int:
    """The dimension of a broadcast index along which `place` counts."""
    sizes = [dim for dim, size in enumerate(place.shape) if size > 1] or [0]
    return sizes[0] + _rank(given) - len(place.shape)


def _numbers_all(place: TapeNode, size: int) -> bool:
    """Returns True if an index is arange(size), in any shape."""
    while place.name in ("view", "unsqueeze", "expand", "_unsafe_view", "alias", "detach"):
        place = place.nodes()[0]
    is_whole = place.name == "arange" and place.shape.numel() == size
    return is_whole and not place.argument("start", 0) and place.argument("step", 1) == 1


def _counts_samples(reading: Reading, place: TapeNode, value: Rows, of: TapeNode) -> bool:
    """Returns True if an index is where a mask is true along its samples, which are those of a tensor."""
    column = 0
    while place.name in ("view", "squeeze", "select", "unbind", "alias", "detach"):
        if place.name == "select":
            column = place.argument("index")
        elif place.name == "unbind":
            column = place.index or 0
        place = place.nodes()[0]
    if place.name != "nonzero":
        return False
    mask = place.nodes()[0]
    its = reading.value(mask)
    is_along = isinstance(its, Rows) and column % len(mask.shape) == its.axis.dim and its.axis.alike(value.axis)
    return is_along and mask.shape[column] == of.shape[value.axis.dim]


def _picks_of(place: TapeNode, values: Values) -> tuple[TapeNode, ...] | None:
    value = values[place]
    return (
        value.axis.picks if isinstance(value, Rows) and value.axis.picks and not place.dtype.is_floating_point else None
    )


def _picked(value: Rows, mask: Rows, node: TapeNode) -> Rows:
    """Entries of samples where a mask is true."""
    if value.axis != mask.axis or mask.factor != ONE or value.axis.picks:
        raise mixes("a mask")
    return Rows(SampleAxis(0, picks=(node,)), value.factor)


def _masked_select(reading: Reading, node: TapeNode, values: Values) -> Value:
    of, mask = node.argument("self"), node.argument("mask")
    value, its = values[of], values[mask]
    if not isinstance(value, Rows) or not isinstance(its, Rows) or mask.shape != of.shape:
        raise mixes("masked_select")
    return _picked(value, its, mask)


def _nonzero(reading: Reading, node: TapeNode, values: Values) -> Value:
    of = node.argument("self")
    value = values[of]
    if not isinstance(value, Rows) or value.axis.picks:
        raise mixes("nonzero of what is picked")
    return Rows(SampleAxis(0, picks=(of,)))


def _index_put(reading: Reading, node: TapeNode, values: Values) -> Value:
    """Entries that are set to a number where a mask of samples is true, or at places that are the same for all."""
    of, [mask, *others], new = node.argument("self"), node.argument("indices"), node.argument("values")
    value, its = values[of], values[mask] if isinstance(mask, TapeNode) else None
    if not isinstance(values[new], Same) or new.shape.numel() != 1 or isinstance(value, TermSum | Known):
        raise mixes(node.name)
    reading.fix([reading.number_of(new)])
    if isinstance(value, Rows):
        reading.plain(value, node)
        is_same = all(each is None or isinstance(values[each], Same) for each in (mask, *others))
        if is_same and all(each is None for each in (mask, *others)[: value.axis.dim + 1]):
            return Rows(value.axis)
    is_mine = value.axis == its.axis if isinstance(value, Rows) and isinstance(its, Rows) else value == Same()
    if others or not isinstance(its, Rows) or mask.dtype not in _MASKS or not is_mine:
        raise mixes(node.name)
    return Rows(its.axis)


def _cat(reading: Reading, node: TapeNode, values: Values) -> Value:
    tensors: list[TapeNode] = node.argument("tensors")
    given = [values[each] for each in tensors]
    if any(isinstance(each, TermSum | Known) for each in given):
        if any(isinstance(each, Rows) for each in given):
            raise UnprovedError("entries of samples beside sums over samples")
        return TermSum(tuple(term for each in given for term in terms_of(each)))
    rows = [each for each in given if isinstance(each, Rows)]
    dim = (node.argument("dim") or 0) % len(node.shape)
    shift = node.name == "stack"
    axes, factors = {each.axis for each in rows}, {each.factor for each in rows}
    if len(axes) != 1 or len(factors) != 1 or (len(rows) < len(given) and factors != {ONE}):
        raise mixes(node.name)
    axis = axes.pop()
    for each, value in zip(tensors, given, strict=True):
        if isinstance(value, Same) and value.varies and each.shape[axis.dim] > 1:
            raise mixes(node.name)
    if shift:
        return Rows(axis.at(axis.dim + (dim <= axis.dim)), factors.pop())
    if dim == axis.dim:
        if len(rows) < len(given) or axis.outer > 1 or axis.picks or len({each.shape for each in tensors}) > 1:
            raise mixes(node.name)
        return Rows(replace(axis, outer=len(rows)), factors.pop())
    return Rows(axis, factors.pop())


def _ctc(reading: Reading, node: TapeNode, values: Values) -> Value:
    """The CTC loss of each sample; log probabilities have the samples in dimension 1, targets in dimension 0."""
    for name, dim in (("log_probs", 1), ("targets", 0), ("input_lengths", 0), ("target_lengths", 0)):
        value = values[node.argument(name)] if isinstance(node.argument(name), TapeNode) else None
        if isinstance(value, Rows) and (value.axis.dim != dim or value.factor != ONE):
            raise mixes("ctc_loss")
        if not isinstance(value, Rows) and name in ("log_probs", "targets"):
            raise mixes("ctc_loss")
    return Rows(SampleAxis(0))


_NAMES: dict[Rule, str] = {
    _sum: "sum mean nansum count_nonzero",
    _reduction: ("amax amin argmax argmin max min any all prod logsumexp var std norm linalg_vector_norm median mode"),
    _along: "_softmax _log_softmax softmax log_softmax cumsum cumprod sort topk",
    _normalized: "native_layer_norm _fused_rms_norm rms_norm layer_norm",
    _batched: (
        "convolution cudnn_convolution native_group_norm pixel_shuffle pixel_unshuffle channel_shuffle "
        "avg_pool1d avg_pool2d adaptive_avg_pool1d _adaptive_avg_pool2d max_pool2d_with_indices adaptive_max_pool2d "
        "upsample_nearest2d upsample_bilinear2d upsample_bicubic2d "
        "_scaled_dot_product_flash_attention _scaled_dot_product_flash_attention_for_cpu "
        "_scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention "
        "_scaled_dot_product_attention_math " + " ".join(BATCH_NORMS)
    ),
    _product: " ".join(_FACTORS),
    _nll: "nll_loss_forward nll_loss2d_forward",
    _per_sample: "multi_margin_loss multilabel_margin_loss_forward",
    _ctc: "_ctc_loss",
    _embedding: "embedding",
    _gather: "gather take_along_dim",
    _scatter: "scatter scatter_add",
    _index: "index",
    _masked_select: "masked_select",
    _nonzero: "nonzero",
    _index_put: "index_put",
    _cat: "cat stack",
}
RULES = {name: rule for rule, names in _NAMES.items() for name in names.split()}
"""What an operator makes of the values of its arguments, by its name."""
