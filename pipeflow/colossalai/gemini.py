"""ColossalAI's Gemini: makes modules with parameters that can be split, and shards them with torch's fully_shard."""

from __future__ import annotations

from functools import partial
from threading import RLock, get_ident
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard
from torch.nn.modules.module import register_module_parameter_registration_hook

from pipeflow.colossalai.tensors import ColoParameter, ColoTensor, ColoTensorSpec, ProcessGroup, is_split
from pipeflow.core.errors import UsageError

_ONE_AT_A_TIME = RLock()  # all threads share torch's hooks


class ColoInitContext:
    """Inside the `with` block, every parameter that a module of this thread registers becomes a ColoParameter on
    `device`. A parameter that several modules share stays one parameter. One on the meta device is left as it is:
    `from_pretrained` of transformers registers the loaded one in its place.

    Args:
        device: device of the parameters.
        dtype: dtype of floating-point parameters; by default they keep their own.
        default_pg: the ProcessGroup of all parameters; by default one without tensor ranks.

    Raises UsageError before `launch`.
    """

    def __init__(
        self,
        device: torch.device | str = "cpu",
        dtype: torch.dtype | None = None,
        default_pg: ProcessGroup | None = None,
    ) -> None:
        self.device, self.dtype = torch.device(device), dtype
        self._group = ProcessGroup() if default_pg is None else default_pg
        self._made: dict[int, tuple[nn.Parameter, ColoParameter]] = {}

    def __enter__(self) -> Self:
        _ONE_AT_A_TIME.acquire()
        self._thread = get_ident()
        self._handle = register_module_parameter_registration_hook(self._registered)  # type: ignore[arg-type]  # it may return
        return self

    def __exit__(self, *error: object) -> None:
        self._handle.remove()
        self._made.clear()
        _ONE_AT_A_TIME.release()

    def _registered(self, module: nn.Module, name: str, parameter: nn.Parameter | None) -> ColoParameter | None:
        """Called for what any thread registers. Returns what takes its place, or None."""
        if get_ident() != self._thread or parameter is None or isinstance(parameter, ColoParameter):
            return None
        if parameter.is_meta and self.device.type != "meta":
            return None
        if id(parameter) not in self._made:  # the dict keeps it alive, so its id stays unique
            dtype = self.dtype if parameter.is_floating_point() else None
            data = parameter.data.to(self.device, dtype or parameter.dtype)
            made = ColoParameter(data, parameter.requires_grad, ColoTensorSpec(self._group))
            vars(made).update(vars(parameter))  # marks, such as transformers' for a weight that is loaded
            self._made[id(parameter)] = parameter, made
        return self._made[id(parameter)][1]


_POLICIES = ("auto", "static", "cpu", "cuda")


class GeminiDDP(nn.Module):
    """Shards a module's parameters, gradients and optimizer states over the data ranks with torch's fully_shard, which
    also averages the gradients. Make the optimizer afterwards, from its parameters.

    Args:
        module: the module. Its ColoParameters may be split over tensor ranks; other parameters are sharded over all
            data ranks.
        device: device of the computation.
        placement_policy: "cpu" keeps the shards in CPU memory, and the optimizer runs there; "auto", "static" and
            "cuda" keep them on the device.
        pin_memory: with "cpu", pin that memory, for faster copies to a GPU.
        search_range_m: has no effect; it configures Gemini's chunks, which fully_shard does not have.

    Raises UsageError for an unknown policy, and if torch.distributed is not initialized.
    """

    def __init__(
        self,
        module: nn.Module,
        device: torch.device | str,
        placement_policy: str = "auto",
        pin_memory: bool = False,
        search_range_m: int = 32,
    ) -> None:
        super().__init__()
        if placement_policy not in _POLICIES:
            raise UsageError(f"placement_policy must be one of {', '.join(_POLICIES)}, got {placement_policy!r}")
        self.module = module.to(device)
        device = torch.device(device)
        first = next((each for each in module.parameters() if isinstance(each, ColoParameter)), None)
        group = ProcessGroup() if first is None else first.process_group
        self._splits = _splits_of(module)
        _plainly(module)
        is_offloaded = placement_policy == "cpu" and device.type != "cpu"
        if group.dp_world_size() > 1 or is_offloaded:
            offload = CPUOffloadPolicy(pin_memory=pin_memory) if is_offloaded else OffloadPolicy()
            spread(self.module, _mesh(group, device), offload_policy=offload)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def tensor_parts(self, name: str, tensor: Tensor) -> tuple[int, int, int] | None:
        """Which part of a parameter of the module its tensor ranks have: (dim, index, count); None if it is not split.
        Recordings of a job ask for it.
        """
        return self._splits.get(name)


def _splits_of(module: nn.Module) -> dict[str, tuple[int, int, int]]:
    return {
        name: (each.split_dim, each.process_group.tp_local_rank(), each.process_group.tp_world_size())
        for name, each in module.named_parameters(remove_duplicate=False)
        if is_split(each)
    }


def _mesh(group: ProcessGroup, device: torch.device) -> DeviceMesh:
    """The DeviceMesh of the data ranks. Raises UsageError if torch has no process group."""
    if not torch.distributed.is_initialized():
        raise UsageError("GeminiDDP needs torch.distributed: start the program with torchrun")
    layout = group.layout
    ranks = torch.arange(layout.world_size, device="cpu").view(layout.data, layout.tensor)
    return DeviceMesh(device.type, ranks, mesh_dim_names=("data", "tensor"))["data"]


def spread(module: nn.Module, mesh: DeviceMesh, **options: Any) -> None:
    """Shards each block of a list separately, so that one is whole at a time, then the rest of the module. `options`
    are those of torch's fully_shard.
    """
    for each in module.modules():
        if isinstance(each, nn.ModuleList):
            for block in each:
                fully_shard(block, mesh=mesh, **options)
    fully_shard(module, mesh=mesh, **options)


def _plainly(module: nn.Module) -> None:
    """Replaces ColoParameters, whose wholes fully_shard would shard, by plain parameters. While a module computes, its
    own parameters are ColoTensors.
    """
    made: dict[int, nn.Parameter] = {}
    for owner in module.modules():
        specs: dict[str, ColoTensorSpec] = {}
        for name, parameter in owner._parameters.items():
            if isinstance(parameter, ColoParameter):
                specs[name] = parameter.spec
                plain = nn.Parameter(parameter.data.as_subclass(Tensor), parameter.requires_grad)
                owner._parameters[name] = made.setdefault(id(parameter), plain)
        if specs:
            owner.register_forward_pre_hook(partial(_begin, specs))
            owner.register_forward_hook(partial(_end, specs), always_call=True)


def _begin(specs: dict[str, ColoTensorSpec], owner: nn.Module, args: object) -> None:
    for name, spec in specs.items():
        parameter = owner._parameters[name]
        assert parameter is not None
        vars(owner)[name] = ColoTensor.from_torch_tensor(parameter, spec)


def _end(specs: dict[str, ColoTensorSpec], owner: nn.Module, args: object, output: object) -> None:
    for name in specs:
        vars(owner).pop(name, None)
