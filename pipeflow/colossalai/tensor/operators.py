"""torch's functions on split ColoTensors: those in `products` compute with parts in their own way, pointwise functions
part by part, all others with the whole.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from pipeflow.colossalai.tensor.products import OPERATORS, as_part, is_split, plain, whole
from pipeflow.colossalai.tensor.specs import ColoTensorSpec
from pipeflow.colossalai.tensor.tensors import ColoTensor

_POINTWISE = {
    *("abs", "clamp", "cos", "erf", "exp", "gelu", "log", "mish", "neg", "relu", "rsqrt", "sigmoid", "silu", "sin"),
    *("add", "contiguous", "div", "mul", "pow", "sqrt", "square", "sub", "tanh", "__neg__"),
    *("bfloat16", "double", "float", "half", "to"),
    *(f"__{side}{name}__" for name in ("add", "sub", "mul", "truediv", "pow") for side in ("", "r")),
}
"""Names of pointwise functions."""
_OF_MEMORY = {
    *("__get__", "__set__", "__hash__", "__len__", "__repr__", "__reduce_ex__", "as_subclass", "backward", "data_ptr"),
    *("detach", "dim", "element_size", "is_complex", "is_contiguous", "is_floating_point", "is_shared", "nelement"),
    *("numel", "register_hook", "register_post_accumulate_grad_hook", "requires_grad_", "retain_grad", "size"),
    *("storage_offset", "stride", "untyped_storage"),
}
"""Names of functions and attributes that refer to this rank's memory."""
_OF_STEPS = {
    *("bfloat16", "cpu", "cuda", "double", "float", "half", "to", "type"),
    *("add", "addcdiv", "addcmul", "clone", "div", "empty_like", "lerp", "mul", "norm", "ones_like", "sub"),
    "zeros_like",
}
"""Names of functions that optimizers and `nn.Module.to` call, without gradients, on parameters and their states."""


def computed(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result of `func` for arguments that contain ColoTensors."""
    if not any(map(is_split, tree_leaves((args, kwargs)))) or _is_of_memory(func, args, kwargs):
        return func(*args, **kwargs)
    if (operator := OPERATORS.get(func)) is not None:
        output = operator(*args, **kwargs)
        if output is not NotImplemented:
            return output
    elif func.__name__ in _POINTWISE and (spec := _common(args, kwargs)) is not None:
        return as_part(func(*tree_map(plain, args), **tree_map(plain, kwargs)), spec)
    return func(*tree_map(whole, args), **tree_map(whole, kwargs))


def _is_of_memory(func: Callable[..., Any], args: Any, kwargs: Any) -> bool:
    """True if a function refers to this rank's part."""
    name = func.__name__
    if name in _OF_MEMORY or (name.endswith("_") and not name.endswith("__")):
        return True
    if torch.is_grad_enabled() or not (name in _OF_STEPS or name.startswith(("_foreach", "_fused"))):
        return False
    tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor) and each.dim()]
    shapes = {each.shape for each in tensors if is_split(each)}
    is_alike = name.startswith("_") or all(each.shape in shapes for each in tensors)
    return is_alike and all(isinstance(each, nn.Parameter) for each in tensors if is_split(each))


def _common(args: Any, kwargs: Any) -> ColoTensorSpec | None:
    """The common spec of all tensors of a pointwise function, except scalars; None if they differ."""
    tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor) and each.dim()]
    first = tensors[0]
    if not isinstance(first, ColoTensor) or isinstance(first, nn.Parameter):
        return None
    alike = (is_split(each) and each.dist_spec == first.dist_spec and each.shape == first.shape for each in tensors)
    return first.spec if all(alike) else None
