"""ColoTensor and ColoParameter: tensors of which a rank may hold a part; and their specs, which say how a tensor is
split over tensor ranks, and how layers compute with it. Every function of torch returns the same result as with the
whole tensor. Products and embeddings compute with the part, as in Megatron-LM (Shoeybi et al., arXiv 1909.08053,
section 3), and so do pointwise functions. All others get the whole tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn import functional

from pipeflow.core.errors import UsageError
from pipeflow.engine.parallel.context import current_context
from pipeflow.engine.parallel.layout import WorldLayout
from pipeflow.engine.parallel.transport.protocol import Group
from pipeflow.engine.tensor.linear import Mode, column_linear, row_linear
from pipeflow.engine.tensor.regions import (
    gather_from_tensor_region,
    reduce_from_tensor_region,
    scatter_to_tensor_region,
)
from pipeflow.engine.torch_private.autograd import without_torch_function
from pipeflow.engine.torch_private.tensors import make_subclass
from pipeflow.engine.torch_private.trees import tree_leaves, tree_map


class ProcessGroup:
    """The world as `dp_degree` x `tp_degree` ranks, where tensor ranks are neighbours. Groups of equal degrees are
    equal.

    Args:
        tp_degree: number of tensor ranks; by default the world size / `dp_degree`.
        dp_degree: number of data ranks; by default the world size / `tp_degree`. Without either all are data ranks.

    Attributes:
        layout: the degrees.
        context: the context of the launch in which it was made.

    Raises UsageError before `launch`, if the degrees do not fit the world, and for a world with a pipeline.
    """

    def __init__(self, *, tp_degree: int | None = None, dp_degree: int | None = None) -> None:
        context = current_context()
        world = context.world_size
        if context.pipeline_size > 1:
            raise UsageError("a ProcessGroup has only tensor and data ranks: launch without pipeline=")
        given = {"tp_degree": tp_degree, "dp_degree": dp_degree}
        for name, degree in given.items():
            if degree is not None and (degree < 1 or world % degree):
                sizes = ", ".join(str(size) for size in range(1, world + 1) if world % size == 0)
                raise UsageError(f"{name}={degree} does not divide the world of {world} ranks: choose one of {sizes}")
        tensor = tp_degree if tp_degree is not None else 1 if dp_degree is None else world // dp_degree
        if dp_degree is not None and tensor * dp_degree != world:
            raise UsageError(f"tp_degree={tp_degree} x dp_degree={dp_degree} is not the world of {world} ranks")
        self.layout = WorldLayout(pipeline=1, tensor=tensor, data=world // tensor)
        self.context = context

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ProcessGroup) and (self.layout, self.context) == (other.layout, other.context)

    def __hash__(self) -> int:
        return hash(self.layout)

    def __repr__(self) -> str:
        return f"ProcessGroup(tp_degree={self.layout.tensor}, dp_degree={self.layout.data})"

    def __deepcopy__(self, memo: object) -> ProcessGroup:
        return self  # channels cannot be copied

    @cached_property
    def tensor(self) -> Group:
        """The ranks that hold the other parts of the same parameters."""
        return self._group(self.tp_rank_list(), self.context.tensor)

    @cached_property
    def data(self) -> Group:
        """The ranks that hold the same parts for other data."""
        return self._group(self.dp_rank_list(), self.context.data)

    def tp_world_size(self) -> int:
        """Returns the number of tensor ranks."""
        return self.layout.tensor

    def dp_world_size(self) -> int:
        """Returns the number of data ranks."""
        return self.layout.data

    def tp_local_rank(self) -> int:
        """Returns this rank's index among the tensor ranks."""
        return self.layout.place(self.context.rank).tensor

    def dp_local_rank(self) -> int:
        """Returns this rank's index among the data ranks."""
        return self.layout.place(self.context.rank).data

    def tp_rank_list(self) -> list[int]:
        """Returns the world ranks of the tensor ranks."""
        return list(self.layout.tensor_ranks(self.context.rank))

    def dp_rank_list(self) -> list[int]:
        """Returns the world ranks of the data ranks."""
        return list(self.layout.data_ranks(self.context.rank))

    def _group(self, ranks: list[int], known: Group) -> Group:
        """The context's own group if it has these ranks, else a new one."""
        return known if self.layout == self.context.layout else self.context.world.group(tuple(ranks))


@dataclass(frozen=True)
class ReplicaSpec:
    """A layout in which every rank has the whole tensor."""


@dataclass(frozen=True)
class ShardSpec:
    """Every tensor rank has an equal part along one dimension.

    Attributes:
        dims: list with the dimension.
        num_partitions: list with the number of parts.

    Raises UsageError for several dimensions.
    """

    dims: Sequence[int]
    num_partitions: Sequence[int]

    def __post_init__(self) -> None:
        if len(self.dims) != 1 or len(self.num_partitions) != 1:
            raise UsageError(
                f"{self} splits {len(self.dims)} dimensions: split one, as in ShardSpec([-1], [pg.tp_world_size()])"
            )

    @property
    def dim(self) -> int:
        """The only one of `dims`."""
        return self.dims[0]


class ComputePattern(Enum):
    """Ways to compute layers. Only TP1D, Megatron-LM's, is supported."""

    TP1D = 0
    TP2D = 1
    TP2P5D = 2
    TP3D = 3


@dataclass
class ComputeSpec:
    """How layers compute with a tensor. Raises UsageError for another pattern than TP1D.

    Attributes:
        compute_pattern: must be TP1D.
        output_replicate: True (the default) if the parts of a layer's output are gathered.
    """

    compute_pattern: ComputePattern
    output_replicate: bool = field(default=True, init=False)

    def __post_init__(self) -> None:
        if self.compute_pattern is not ComputePattern.TP1D:
            raise UsageError(f"{self.compute_pattern} is not supported: use ComputePattern.TP1D")

    def set_output_replicate(self, flag: bool = True) -> None:
        """Sets whether the parts of a layer's output are gathered."""
        self.output_replicate = flag


@dataclass
class ColoTensorSpec:
    """The complete spec of a tensor: its ranks, how it is split over them, and how layers compute with it."""

    pg: ProcessGroup
    dist_attr: ReplicaSpec | ShardSpec = field(default_factory=ReplicaSpec)
    compute_attr: ComputeSpec | None = None


def part_of(whole: Tensor, spec: ColoTensorSpec) -> Tensor:
    """This rank's part of a whole tensor, copied if it is smaller. Its backward gathers the gradients."""
    if not isinstance(spec.dist_attr, ShardSpec) or spec.pg.tp_world_size() == 1:
        return whole
    last = whole.movedim(spec.dist_attr.dim, -1)
    return scatter_to_tensor_region(last, spec.pg.tensor).movedim(-1, spec.dist_attr.dim).contiguous()


def whole_of(part: Tensor, spec: ColoTensorSpec) -> Tensor:
    """The whole tensor, gathered from all tensor ranks. In its backward every rank takes its part of the gradient."""
    if not isinstance(spec.dist_attr, ShardSpec) or spec.pg.tp_world_size() == 1:
        return part
    last = part.movedim(spec.dist_attr.dim, -1)
    return gather_from_tensor_region(last, spec.pg.tensor).movedim(-1, spec.dist_attr.dim)


class ColoTensor(Tensor):
    """A tensor of which this rank may hold only a part. Its memory, `shape` and gradient are those of the part.

    Attributes:
        process_group: the ProcessGroup whose tensor ranks hold it.
        dist_spec: how it is split over them.
        compute_spec: how layers compute with it; None if it is whole.
    """

    process_group: ProcessGroup
    dist_spec: ReplicaSpec | ShardSpec
    compute_spec: ComputeSpec | None

    @classmethod
    def from_torch_tensor(cls, tensor: Tensor, spec: ColoTensorSpec | None = None) -> ColoTensor:
        """Makes a ColoTensor with the same memory: a whole tensor, or with `spec` the part that it describes."""
        made: ColoTensor = tensor.as_subclass(cls)
        made.describe(ColoTensorSpec(ProcessGroup()) if spec is None else spec)
        return made

    def describe(self, spec: ColoTensorSpec) -> None:
        """Sets the tensor's spec without changing its memory."""
        self.process_group, self.dist_spec, self.compute_spec = spec.pg, spec.dist_attr, spec.compute_attr

    @property
    def spec(self) -> ColoTensorSpec:
        return ColoTensorSpec(self.process_group, self.dist_spec, self.compute_spec)

    @property
    def split_dim(self) -> int:
        """The dimension along which it is split."""
        assert isinstance(self.dist_spec, ShardSpec)
        return self.dist_spec.dim

    def is_replicate(self) -> bool:
        """Returns True if this rank has the whole tensor."""
        return not isinstance(self.dist_spec, ShardSpec) or self.process_group.tp_world_size() == 1

    def set_process_group(self, pg: ProcessGroup) -> None:
        """Moves a whole tensor to another ProcessGroup; afterwards all of its ranks have rank 0's values.

        Raises UsageError for a tensor that is split, or that tensor ranks share already.
        """
        if pg == self.process_group:
            return
        if not self.is_replicate() or self.process_group.tp_world_size() > 1:
            raise UsageError(f"the tensor is shared by the ranks of {self.process_group}: make it whole first")
        self.process_group = pg
        with torch.no_grad():
            for group in (pg.data, pg.tensor):
                values = self.data.contiguous()
                group.broadcast(values, 0).wait()
                self.data.copy_(values)

    def set_tensor_spec(self, dist_spec: ReplicaSpec | ShardSpec, compute_spec: ComputeSpec | None) -> None:
        """Splits the tensor over the tensor ranks, or makes it whole, as `dist_spec` says.

        Raises UsageError if the number of parts is not the number of tensor ranks, if the dimension does not exist, or
        if it has no equal parts.
        """
        whole = whole_of(self.data, self.spec)
        if isinstance(dist_spec, ShardSpec):
            size = self.process_group.tp_world_size()
            if [*dist_spec.num_partitions] != [size]:
                raise UsageError(f"{dist_spec} does not have one part for each of {size} tensor ranks")
            if not -whole.dim() <= dist_spec.dim < whole.dim():
                raise UsageError(f"{dist_spec} splits a dimension that a tensor of shape {tuple(whole.shape)} lacks")
            if whole.shape[dist_spec.dim] % size:
                raise UsageError(
                    f"dimension {dist_spec.dim} of shape {tuple(whole.shape)} does not divide into {size} equal parts: "
                    "choose a tp_degree that divides it, or keep the tensor whole"
                )
        spec = ColoTensorSpec(self.process_group, dist_spec, compute_spec)
        self.data = part_of(whole, spec)
        self.grad = None
        self.describe(spec)

    def to_replicate(self) -> Tensor:
        """Returns the whole as a plain tensor. All tensor ranks call it together."""
        return whole_of(self.detach(), self.spec)

    def size_global(self) -> torch.Size:
        """Returns the shape of the whole."""
        shape = list(self.shape)
        if isinstance(self.dist_spec, ShardSpec):
            shape[self.dist_spec.dim] *= self.process_group.tp_world_size()
        return torch.Size(shape)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Iterable[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        with without_torch_function():
            return computed(func, args, kwargs or {})


class ColoParameter(ColoTensor, nn.Parameter):
    """A parameter that is a ColoTensor. By default it is whole, and its group has only data ranks."""

    def __new__(cls, data: Tensor, requires_grad: bool = True, spec: ColoTensorSpec | None = None) -> ColoParameter:
        with without_torch_function():
            made: ColoParameter = make_subclass(cls, data, requires_grad)
        made.describe(ColoTensorSpec(ProcessGroup()) if spec is None else spec)
        return made

    def __init__(self, data: Tensor, requires_grad: bool = True, spec: ColoTensorSpec | None = None) -> None:
        pass

    def __deepcopy__(self, memo: dict[int, Any]) -> ColoParameter:
        if id(self) not in memo:
            memo[id(self)] = ColoParameter(self.data.clone(), self.requires_grad, self.spec)
        made: ColoParameter = memo[id(self)]
        return made

    def __repr__(self) -> str:  # type: ignore[override]  # torch's own has an argument of its own use
        return f"ColoParameter: {self.dist_spec}, {self.data!r}"


def is_split(value: object) -> TypeGuard[ColoTensor]:
    """True for a ColoTensor of which this rank has only a part."""
    return isinstance(value, ColoTensor) and not value.is_replicate()


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    """functional.linear: the weight is (out, in)."""
    return _product(input, weight, bias, {0: "out", 1: "in"})


def _addmm(input: Tensor, mat1: Tensor, mat2: Tensor, *, beta: float = 1, alpha: float = 1) -> Any:
    """torch.addmm, as a Conv1D calls it: the weight is (in, out)."""
    return NotImplemented if (beta, alpha) != (1, 1) else _product(mat1, mat2, input, {0: "in", 1: "out"})


def _product(input: Tensor, weight: Tensor, bias: Tensor | None, meaning: dict[int, str]) -> Any:
    if not is_split(weight):
        return NotImplemented
    mode = Mode(weight.process_group.tensor, False, None)
    dim = weight.split_dim % 2
    matrix = plain(weight) if meaning[0] == "out" else plain(weight).t()
    if meaning[dim] == "in":
        return row_linear(_part(input, -1, weight), matrix, whole(bias), mode)
    output = column_linear(whole(input), matrix, None if bias is None else _part(bias, 0, weight), mode)
    return _as_asked(output, weight)


def _embedding(
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Any:
    """functional.embedding: the weight is (entries, hidden)."""
    if not is_split(weight) or max_norm is not None or scale_grad_by_freq or sparse:
        return NotImplemented
    group, rows = weight.process_group.tensor, weight.shape[0]
    if weight.split_dim % 2 == 1:
        return _as_asked(functional.embedding(input, plain(weight), padding_idx), weight)
    local = input - group.rank * rows
    elsewhere = (local < 0) | (local >= rows)
    if padding_idx is not None:
        padding_idx = padding_idx % (rows * group.size) - group.rank * rows
        padding_idx = padding_idx if 0 <= padding_idx < rows else None
    part = functional.embedding(local.masked_fill(elsewhere, 0), plain(weight), padding_idx)
    return reduce_from_tensor_region(part.masked_fill(elsewhere.unsqueeze(-1), 0), group)


def _reshape(input: Tensor, *shape: Any) -> Any:
    """Tensor.view and reshape: the whole's size as last dimension is replaced by the part's."""
    sizes = list(shape[0] if len(shape) == 1 and isinstance(shape[0], tuple | list | torch.Size) else shape)
    if not isinstance(input, ColoTensor) or isinstance(input, nn.Parameter) or not sizes:
        return NotImplemented
    if sizes[-1] not in (input.shape[-1], input.size_global()[-1]):
        return NotImplemented
    return as_part(plain(input).reshape(*sizes[:-1], input.shape[-1]), input.spec)


def _as_asked(output: Tensor, weight: ColoTensor) -> Tensor:
    """A layer's output, split along the last dimension; it is gathered unless the weight's spec says otherwise."""
    spec = ColoTensorSpec(weight.process_group, ShardSpec([-1], [weight.process_group.tp_world_size()]))
    if weight.compute_spec is None or weight.compute_spec.output_replicate:
        return whole_of(output, spec)
    return as_part(output, spec)


def as_part(output: Tensor, spec: ColoTensorSpec) -> Tensor:
    """This rank's output as the part of a ColoTensor with this spec."""
    return ColoTensor.from_torch_tensor(output, spec)


def _part(value: Tensor, dim: int, weight: ColoTensor) -> Tensor:
    """This rank's part of an operand, which may be whole."""
    if is_split(value):
        own: Tensor = plain(value)
        return own
    shares = ShardSpec([dim], [weight.process_group.tp_world_size()])
    return part_of(plain(value), ColoTensorSpec(weight.process_group, shares))


def whole(value: Any) -> Any:
    """The whole of a ColoTensor as a plain tensor; other values unchanged."""
    return whole_of(plain(value), value.spec) if isinstance(value, ColoTensor) else value


def plain(value: Any) -> Any:
    """The same memory as a plain torch tensor, in the same graph."""
    return value.as_subclass(Tensor) if isinstance(value, ColoTensor) else value


OPERATORS: dict[Callable[..., Any], Callable[..., Any]] = {
    functional.linear: _linear,
    torch.addmm: _addmm,
    functional.embedding: _embedding,
    Tensor.view: _reshape,
    Tensor.reshape: _reshape,
}


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
