"""Term rules: what each operator that is not pointwise makes of samples, and of sums over samples, in which it must be
linear. An operator without a rule is an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pipeflow.engine.stages.index_rules import INDEX_RULES
from pipeflow.engine.stages.samples import SampleAxis, UnprovedError, aligned, dims_of, mixes, reshaped, without
from pipeflow.engine.stages.tape import TapeNode
from pipeflow.engine.stages.terms import Reading, Rule, Values
from pipeflow.engine.stages.values import ONE, Factor, Known, Rows, Same, Term, TermSum, Value, over, terms_of, times


def linear(reading: Reading, node: TapeNode, values: Mapping[TapeNode, Value]) -> Value:
    """An operator on sums over samples, which must be linear in them."""
    if any(isinstance(each, Rows) for each in values.values()):
        raise UnprovedError(f"{node.name} of entries of samples with a sum over samples")
    first, other = node.argument("self"), node.argument("other") if node.name != "neg" else None

    def scaled(of: Any, by: Any, *, divides: bool) -> TermSum:
        value, scale = values[of], reading.value(by) if isinstance(by, TapeNode) else None
        if isinstance(scale, TermSum) or not isinstance(value, TermSum):
            raise UnprovedError(f"{node.name} of two sums over samples that depend on parameters")
        known = reading.multiplied(by, {} if scale is None else {by: scale})
        return TermSum(tuple(Term((over if divides else times)(each.factor, known), each.adds) for each in value.terms))

    match node.name:
        case "neg" | "nan_to_num":
            return values[first]
        case "mul":
            is_first = isinstance(first, TapeNode) and isinstance(reading.value(first), TermSum)
            of, by = (first, other) if is_first else (other, first)
            return scaled(of, by, divides=False)
        case "div" if isinstance(first, TapeNode) and node.argument("rounding_mode") is None:
            return scaled(first, other, divides=True)
        case "add" | "sub" | "rsub":
            alpha = reading.number(node.argument("alpha", 1))
            by = (alpha, ONE) if node.name == "rsub" else (ONE, alpha)
            both = [values[each] if isinstance(each, TapeNode) else each for each in (first, other)]
            given = [
                (factor, term)
                for each, factor in zip(both, by, strict=True)
                if not _is_zero(each)
                for term in terms_of(_same(each))
            ]
            return TermSum(tuple(Term(times(term.factor, factor), term.adds) for factor, term in given))
        case "where":
            return _chosen(node, values, first, other)
    raise UnprovedError(f"{node.name} of a sum over samples is no sum over samples")


def _same(value: Any) -> Value:
    return value if isinstance(value, Same | Rows | TermSum | Known) else Same()


def _is_zero(value: Any) -> bool:
    return isinstance(value, int | float) and value == 0


def _chosen(node: TapeNode, values: Mapping[TapeNode, Value], first: Any, other: Any) -> Value:
    """`where` on sums over samples: a term whose condition is false has the factor 0."""
    condition = node.argument("condition")
    if not isinstance(values[condition], Known | Same):
        raise UnprovedError("where chooses by a sum over samples that depends on parameters")
    given = values[condition]
    chosen = given.factor if isinstance(given, Known) else Factor("same", (condition,))
    terms = [Term(Factor("if", (chosen, each.factor)), each.adds) for each in terms_of(values[first])]
    if other.name not in ("zeros_like", "zeros", "new_zeros", "scalar_tensor"):
        terms += [Term(Factor("unless", (chosen, each.factor)), each.adds) for each in terms_of(values[other])]
    return TermSum(tuple(terms))


def _only(node: TapeNode, values: Values, name: str = "self") -> tuple[TapeNode, Rows]:
    """An argument that has samples. Raises UnprovedError if it is a sum over them."""
    of = node.argument(name)
    value = values[of]
    if not isinstance(value, Rows):
        raise UnprovedError(f"{node.name} of a sum over samples is no sum over samples")
    return of, value


def _sum(reading: Reading, node: TapeNode, values: Values) -> Value:
    of = node.argument("self")
    dims, keepdim = dims_of(node, "dim", of) if _takes(node, "dim") else list(range(len(of.shape))), _keeps(node)
    return reading.reduced(node, values[of], of, dims, is_mean=node.name == "mean", keepdim=keepdim)


def _takes(node: TapeNode, name: str) -> bool:
    return any(each.name == name for each in node.func._schema.arguments)


def _keeps(node: TapeNode) -> bool:
    return _takes(node, "keepdim") and bool(node.argument("keepdim"))


def _reduction(reading: Reading, node: TapeNode, values: Values) -> Value:
    """A reduction that is no sum: of other dimensions than that of the samples."""
    of, value = _only(node, values)
    dims = dims_of(node, "dim", of) if _takes(node, "dim") else list(range(len(of.shape)))
    if value.axis.dim in dims and node.name in ("any", "all") and node.is_known and not node.shape:
        counted = Factor("total", (node, ONE))  # of the microbatches for which it is true
        return Known(
            Factor("some", (counted,)) if node.name == "any" else Factor("each", (counted, Factor("entries", (1,))))
        )
    if value.axis.dim in dims:
        raise UnprovedError(f"{node.name} over all samples is no sum over samples")
    return Rows(without(value.axis, dims, keepdim=_keeps(node)), reading.plain(value, node))


def _counted(reading: Reading, node: TapeNode, values: Values) -> Value:
    """The number of entries that are not 0."""
    of, value = _only(node, values)
    counted = Rows(value.axis, reading.plain(value, node))
    return reading.reduced(node, counted, of, dims_of(node, "dim", of), is_mean=False, keepdim=False)


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
        factor = times(*(value.factor for _, value in mine if isinstance(value, Rows)))
        if node.is_known:
            return Known(times(factor, Factor("total", (node, factor))))
        return TermSum((Term(factor),))
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


_FACTORS = {"mm": ("self", "mat2"), "bmm": ("self", "mat2"), "mv": ("self", "vec"), "dot": ("self", "tensor")}
_FACTORS |= {"addmm": ("mat1", "mat2"), "baddbmm": ("batch1", "batch2")}


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


def _new_axis(reading: Reading, node: TapeNode, values: Values) -> Value:
    of, value = _only(node, values)
    return Rows(reshaped(value.axis, of.shape, node.shape), value.factor)


def _ctc(reading: Reading, node: TapeNode, values: Values) -> Value:
    """The CTC loss of each sample; log probabilities have the samples in dimension 1, targets in dimension 0."""
    for name, dim in (("log_probs", 1), ("targets", 0), ("input_lengths", 0), ("target_lengths", 0)):
        value = values[node.argument(name)] if isinstance(node.argument(name), TapeNode) else None
        if isinstance(value, Rows) and (value.axis.dim != dim or value.factor != ONE):
            raise mixes("ctc_loss")
        if not isinstance(value, Rows) and name in ("log_probs", "targets"):
            raise mixes("ctc_loss")
    return Rows(SampleAxis(0))


RULES: dict[str, Rule] = {
    **dict.fromkeys(("sum", "mean", "nansum"), _sum),
    "count_nonzero": _counted,
    **dict.fromkeys(("amax", "amin", "argmax", "argmin", "max", "min", "any", "all", "prod", "logsumexp"), _reduction),
    **dict.fromkeys(("var", "std", "norm", "linalg_vector_norm", "median", "mode"), _reduction),
    **dict.fromkeys(
        ("_softmax", "_log_softmax", "softmax", "log_softmax", "cumsum", "cumprod", "sort", "topk"), _along
    ),
    **dict.fromkeys(("native_layer_norm", "_fused_rms_norm", "rms_norm", "layer_norm"), _normalized),
    **dict.fromkeys(_FACTORS, _product),
    **dict.fromkeys(("nll_loss_forward", "nll_loss2d_forward"), _nll),
    **dict.fromkeys(("multi_margin_loss", "multilabel_margin_loss_forward"), _per_sample),
    **dict.fromkeys(("_ctc_loss",), _ctc),
    "embedding": _embedding,
    **dict.fromkeys(("gather", "take_along_dim"), _gather),
    **dict.fromkeys(("scatter", "scatter_add"), _scatter),
    **INDEX_RULES,
    **dict.fromkeys(("cat", "stack"), _cat),
    **dict.fromkeys(("convolution", "native_batch_norm", "_native_batch_norm_legit", "native_group_norm"), _batched),
    **dict.fromkeys(("_native_batch_norm_legit_functional", "cudnn_batch_norm", "max_pool2d_with_indices"), _batched),
    **dict.fromkeys(("avg_pool2d", "_adaptive_avg_pool2d", "adaptive_avg_pool1d", "adaptive_max_pool2d"), _batched),
    **dict.fromkeys(("upsample_nearest2d", "upsample_bilinear2d", "upsample_bicubic2d", "avg_pool1d"), _batched),
    **dict.fromkeys(("pixel_shuffle", "pixel_unshuffle", "channel_shuffle"), _batched),
    **dict.fromkeys(
        ("_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_efficient_attention"), _batched
    ),
    **dict.fromkeys(("_scaled_dot_product_flash_attention", "_scaled_dot_product_cudnn_attention"), _batched),
    **dict.fromkeys(("_scaled_dot_product_attention_math", "cudnn_convolution", "miopen_batch_norm"), _batched),
}
