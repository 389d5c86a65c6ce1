"""ColoTensor and ColoParameter: tensors of which a rank may hold a part, and that any of torch's functions computes
with as if it were the whole. Must not contain: how functions compute with parts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from pipeflow.colossalai.tensor.lying import part_of, whole_of
from pipeflow.colossalai.tensor.process_group import ProcessGroup
from pipeflow.colossalai.tensor.specs import ColoTensorSpec, ComputeSpec, ReplicaSpec, ShardSpec
from pipeflow.core.errors import UsageError


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
            if dist_spec.partitions != size:
                raise UsageError(f"{dist_spec} has {dist_spec.partitions} parts, but there are {size} tensor ranks")
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

    def set_dist_spec(self, dist_spec: ReplicaSpec | ShardSpec) -> None:
        """Like `set_tensor_spec`, but keeps the compute spec."""
        self.set_tensor_spec(dist_spec, self.compute_spec)

    def set_compute_spec(self, compute_spec: ComputeSpec) -> None:
        """Sets how layers compute with the tensor."""
        self.compute_spec = compute_spec

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
        from pipeflow.colossalai.tensor.operators import computed  # which knows this class

        with torch._C.DisableTorchFunctionSubclass():
            return computed(func, args, kwargs or {})


class ColoParameter(ColoTensor, nn.Parameter):
    """A parameter that is a ColoTensor. By default it is whole, and its group has only data ranks."""

    def __new__(cls, data: Tensor, requires_grad: bool = True, spec: ColoTensorSpec | None = None) -> ColoParameter:
        with torch._C.DisableTorchFunctionSubclass():
            made: ColoParameter = Tensor._make_subclass(cls, data, requires_grad)
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
