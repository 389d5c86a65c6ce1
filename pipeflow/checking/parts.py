"""Parts: which blocks of the whole model's tensors a rank holds, and under which names, for the engines that are known:
DTensors (tensor parallelism and fully_shard), FullyShardedDataParallel, Megatron-LM, DeepSpeed and pipeflow. Everything
else is whole, unless the caller's function says more. Also initial weights of which each rank takes its parts.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from pipeflow.checking.sketches import Block, flat_blocks
from pipeflow.core.errors import UsageError
from pipeflow.core.files import replacing
from pipeflow.engine.parallel.sharding import own_values
from pipeflow.engine.runtime.original import unwrapped_name

Cut = Callable[[Tensor], list[Block]]
Parts = Callable[[str, Tensor], object]


@dataclass(slots=True)
class Part:
    """A rank's part of a tensor of the whole model.

    Attributes:
        name: the tensor's name in the whole model.
        tensor: the rank's parameter or buffer.
        shape: of the whole tensor.
        cut: cuts a tensor of the local shape, such as a gradient, into blocks of the whole.
        stage: index of its pipeline stage; None if the engine does not say.
        own_gradient: returns its gradient where an engine keeps it elsewhere.
        chunk: index of the module that has it, of those that are recorded.
        master: a copy in another precision that an optimizer steps; None if it steps the tensor.
        offsets: where the blocks lie: (offset, shape) for each.
    """

    name: str
    tensor: Tensor
    shape: tuple[int, ...]
    cut: Cut
    stage: int | None = None
    own_gradient: Callable[[], Tensor | None] | None = None
    chunk: int = 0
    master: Tensor | None = None

    @property
    def stepped(self) -> Tensor:
        """What an optimizer steps."""
        return self.tensor if self.master is None else self.master

    def gradient(self) -> Tensor | None:
        """The gradient that the optimizer will use; None if there is none."""
        if self.own_gradient is not None:
            return self.own_gradient()
        if self.master is not None and self.master.grad is not None:
            return self.master.grad
        found: Tensor | None = getattr(self.tensor, "main_grad", None)  # where Megatron-LM adds gradients up
        return self.tensor.grad if found is None or self.tensor.grad is not None else found

    @property
    def offsets(self) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        return [(block.offset, tuple(block.values.shape)) for block in self.cut(self.tensor)]


def parts_of(models: Sequence[nn.Module], given: Parts | None, names: Callable[[str], str] | None) -> list[Part]:
    """This rank's parts of the parameters and buffers of its modules. A tensor with several names has one for each."""
    found: list[Part] = []
    if given is None:  # a wrapper may know, as that for ColossalAI's programs does
        known_by: list[Any] = [model for model in models if callable(getattr(model, "tensor_parts", None))]
        given = known_by[0].tensor_parts if known_by else None
    for chunk, model in enumerate(models):
        known = _of_pipeflow(model) or _of_flat(model)
        if known is None:
            known = [_plain_part(name, tensor) for name, tensor in tensors_of(model)]
        for part in known:
            part.chunk = chunk
        found.extend(known)
    for part in found:
        part.name = part.name if names is None else names(part.name)
        if given is not None and (told := given(part.name, part.tensor)) is not None:
            part.cut, part.shape = _told(part, told)
    return found


def find_masters(parts: Sequence[Part], tensors: Sequence[Tensor]) -> None:
    """Finds which of these tensors is the copy of a parameter in another precision: the only one that rounds to it."""
    for part in parts:
        same = [each for each in tensors if _rounds_to(own_values(each).detach(), own_values(part.tensor).detach())]
        if len(same) == 1:
            part.master = same[0]


def _rounds_to(copy: Tensor, own: Tensor) -> bool:
    if (copy.shape, copy.device) != (own.shape, own.device) or copy.dtype == own.dtype:
        return False
    first = (0,) * own.dim()  # tells most apart at little cost
    return own.numel() > 0 and bool(copy[first].to(own.dtype) == own[first]) and torch.equal(copy.to(own.dtype), own)


def tensors_of(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The parameters and buffers of a module by plain name; a tied tensor comes under each of its names."""
    for name, parameter in model.named_parameters(remove_duplicate=False):
        yield unwrapped_name(name), parameter
    for name, buffer in model.named_buffers(remove_duplicate=False):
        yield unwrapped_name(name), buffer


def _plain_part(name: str, tensor: Tensor) -> Part:
    if hasattr(tensor, "device_mesh"):
        return _distributed(name, tensor)
    if hasattr(tensor, "ds_id") or hasattr(tensor, "_hp_mapping"):
        return _of_deepspeed(name, tensor)
    is_divided = getattr(tensor, "tensor_model_parallel", False) and getattr(tensor, "partition_dim", -1) >= 0
    if is_divided and "megatron.core.parallel_state" in sys.modules:  # else an engine's own, that says no rank
        return _of_megatron(name, tensor)
    return _whole(name, tensor)


def _whole(name: str, tensor: Tensor) -> Part:
    if is_lazy(tensor):
        raise UsageError(f"{name} has no shape yet: call the model once under torch.no_grad() before it is recorded")
    return Part(name, tensor, tuple(tensor.shape), lambda values: [Block(values.to_dense(), (0,) * values.dim())])


def _distributed(name: str, tensor: Any) -> Part:
    from pipeflow.engine.torch_private.distributed import compute_local_shape_and_global_offset

    _, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)

    def cut(values: Any) -> list[Block]:
        if (
            getattr(values, "placements", tensor.placements) != tensor.placements
        ):  # a gradient that is partial, or whole
            values = values.redistribute(placements=tensor.placements)  # as the optimizer does
        return [Block(own_values(values), tuple(offset))]

    return Part(name, tensor, tuple(tensor.shape), cut)


def _of_megatron(name: str, tensor: Any) -> Part:
    """A parameter with Megatron-LM's attributes: an even part along `partition_dim`."""
    state: Any = sys.modules["megatron.core.parallel_state"]
    dim, shape = tensor.partition_dim, list(tensor.shape)
    offset = [0] * len(shape)
    offset[dim] = state.get_tensor_model_parallel_rank() * shape[dim]
    shape[dim] *= state.get_tensor_model_parallel_world_size()
    return Part(name, tensor, tuple(shape), lambda values: [Block(values, tuple(offset))])


def _of_deepspeed(name: str, tensor: Any) -> Part:
    """A parameter of DeepSpeed's ZeRO: stages 1 and 2 keep a fragment of the gradient, stage 3 also of the weight."""
    deepspeed: Any = sys.modules["deepspeed"]

    if hasattr(tensor, "ds_shape"):
        import torch.distributed as dist

        shape, group = tuple(tensor.ds_shape), getattr(tensor, "ds_process_group", None)
        each = -(-prod(shape) // dist.get_world_size(group))
        start = min(each * dist.get_rank(group), prod(shape))

        def cut(values: Tensor) -> list[Block]:
            return list(flat_blocks(values.flatten()[: max(0, prod(shape) - start)], start, shape))

        held = deepspeed.utils.safe_get_local_fp32_param(tensor)
        return Part(name, held, shape, cut, None, lambda: deepspeed.utils.safe_get_local_grad(tensor))
    shape, mapping = tuple(tensor.shape), tensor._hp_mapping
    if mapping is None:
        return Part(name, tensor.detach().flatten()[:0], shape, lambda _: [])
    address = mapping.lp_fragment_address

    def fragment(values: Tensor) -> list[Block]:
        values = values.flatten()
        if values.numel() > address.numel:  # of bfloat16 weights, the rank keeps whole gradients
            values = values[address.start : address.start + address.numel]
        return list(flat_blocks(values, address.start, shape))

    def gradient() -> Tensor | None:
        kept = mapping.offload_gradient_dict if mapping.use_offload else mapping.gradient_dict
        if kept.get(mapping.param_group_index) is None:  # before a backward
            return None
        found: Tensor = mapping.get_lp_grad_fragment(tensor._index_in_param_group)
        return found

    return Part(name, mapping.get_hp_fragment(), shape, fragment, None, gradient)


def _of_flat(model: nn.Module) -> list[Part] | None:
    """The parts of a model with FullyShardedDataParallel in it, whose flat parameters are cut evenly."""
    handles = [(name, each) for name, module in model.named_modules() if (each := getattr(module, "_handle", None))]
    if not handles:
        return None
    found: list[Part] = []
    for prefix, handle in handles:
        flat = handle.flat_param
        infos = zip(flat._fqns, flat._shapes, flat._shard_param_infos, flat._params or flat._fqns, strict=True)
        for name, shape, info, own in infos:
            full = unwrapped_name(f"{prefix}.{name}".lstrip("."))
            found.append(_flat_part(full, tuple(shape), info, flat, own))
    flat_names = {each.name for each in found}
    rest = [(name, tensor) for name, tensor in tensors_of(model) if name.rpartition(".")[2] != "_flat_param"]
    return found + [_whole(name, tensor) for name, tensor in rest if name not in flat_names]


def _flat_part(name: str, shape: tuple[int, ...], info: Any, flat: Any, own: object) -> Part:
    start, numel = info.offset_in_shard or 0, info.numel_in_shard or 0  # of the part within the rank's flat shard
    begin = info.intra_param_start_idx or 0
    held = flat._local_shard if getattr(flat, "_local_shard", None) is not None else flat

    def cut(values: Tensor) -> list[Block]:
        values = values.flatten()
        return list(flat_blocks(values[:numel], begin, shape)) if numel else []

    def gradient() -> Tensor | None:
        if isinstance(own, Tensor) and own.grad is not None:
            return own.grad
        whole: Tensor | None = flat.grad
        return None if whole is None else whole.flatten()[start : start + numel]

    return Part(name, held.detach().flatten()[start : start + numel], shape, cut, None, gradient)


def _of_pipeflow(model: nn.Module) -> list[Part] | None:
    """The parts of a Pipeline, or of a module with tensor-parallel layers of pipeflow."""
    if "pipeflow.engine.runtime.pipeline" not in sys.modules:
        return None
    from pipeflow.engine.parallel.sharding import splits_of
    from pipeflow.engine.runtime.pipeline import Pipeline
    from pipeflow.training.checkpoint.pieces import LocalTensor, context_of, local_tensors

    if not isinstance(model, Pipeline) and not splits_of(model):
        return None

    def part(own: LocalTensor) -> Part:
        def blocks(values: Tensor) -> list[Block]:
            return [Block(each.tensor, tuple(each.offset)) for each in own.pieces_of(values)]

        return Part(unwrapped_name(own.name), own.tensor, tuple(own.shape), blocks, own.stage)

    return [part(each) for each in local_tensors(model, context_of(model), None)]


def _told(part: Part, told: Any) -> tuple[Cut, tuple[int, ...]]:
    """The cut and the whole shape from what the caller's function returned: (dim, index, count) for an even part, or
    (shape, blocks) with blocks of (local slices, offset). An even part of a DTensor is one of its whole.

    Raises UsageError for anything else.
    """
    name, tensor = part.name, part.tensor
    match told:
        case (int(dim), int(index), int(count)) if 0 <= index < count and -tensor.dim() <= dim < tensor.dim():
            known = part.cut if hasattr(tensor, "device_mesh") else _whole(name, tensor).cut
            counts = [count if each == dim % tensor.dim() else 1 for each in range(tensor.dim())]
            moved = [index * size * (many > 1) for size, many in zip(tensor.shape, counts, strict=True)]
            whole = tuple(size * many for size, many in zip(tensor.shape, counts, strict=True))

            def cut(values: Tensor) -> list[Block]:
                places = ((each, zip(each.offset, moved, strict=True)) for each in known(values))
                return [Block(each.values, tuple(map(sum, place))) for each, place in places]

            return cut, whole
        case (shape, [*blocks]):
            return lambda values: [Block(values[where], tuple(offset)) for where, offset in blocks], tuple(shape)
        case _:
            raise UsageError(
                f"parts({name!r}, tensor) returned {told!r}: return None, (dim, index, count) for an even part, or "
                "(shape of the whole, [(slices of the tensor, offset in the whole), ...])"
            )


INDEX, VALUES = "weights.json", "weights.f32"


def keep_weights(folder: str | os.PathLike[str], model: nn.Module) -> None:
    """Writes the parameters and buffers of a model that is whole in this process, as float32, for `take_weights`.

    Args:
        folder: where they go; that of the recording will do.
        model: the module.

    Raises UsageError if this process has only parts of the model, or if files of these names are there that are not
    weights.
    """
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    if any(os.path.lexists(path / name) for name in (INDEX, VALUES)) and not _is_kept(path):
        raise UsageError(f"{path} has a {INDEX} or {VALUES} that keep_weights did not write: choose another folder")
    index: dict[str, Any] = {}
    start = 0
    with replacing(path / VALUES) as values_file, values_file.open("wb") as file:
        for part in parts_of([model], None, None):
            values = own_values(part.tensor).detach()
            if tuple(values.shape) != part.shape:
                raise UsageError(f"this process has only a part of {part.name}: keep the weights of the plain run")
            file.write(values.to("cpu", torch.float32).contiguous().numpy().tobytes())
            index[part.name] = {"shape": part.shape, "start": start}
            start += values.numel()
    with replacing(path / INDEX) as index_file:
        index_file.write_text(json.dumps(index), encoding="utf-8")


def _is_kept(path: Path) -> bool:
    """True if the folder has the weights that an earlier call wrote, and nothing else under their names."""
    if any(file.is_symlink() or not file.is_file() for file in (path / INDEX, path / VALUES)):
        return False
    with suppress(OSError, ValueError):
        index = json.loads((path / INDEX).read_text(encoding="utf-8"))
        return isinstance(index, dict) and all(
            isinstance(each, dict) and {*each} == {"shape", "start"} for each in index.values()
        )
    return False


def take_weights(
    folder: str | os.PathLike[str],
    model: nn.Module,
    *,
    parts: Parts | None = None,
    names: Callable[[str], str] | None = None,
) -> None:
    """Fills this rank's parts of a model with the weights that a plain run kept. Call it before optimizers copy them.

    Args:
        folder: that of `keep_weights`.
        model: this rank's module.
        parts, names: as in `record`.

    Raises UsageError if the folder has no weights, or lacks one of the model or has it in another shape.
    """
    path = Path(folder)
    try:
        index = json.loads((path / INDEX).read_text(encoding="utf-8"))
        values = np.memmap(path / VALUES, "<f4", "r")
    except (OSError, ValueError) as error:
        raise UsageError(
            f"{folder} has no weights: write them with pipeflow.checking.keep_weights ({error})"
        ) from error
    with torch.no_grad():
        for part in parts_of([model], parts, names):
            whole = torch.from_numpy(np.array(_kept_values(path, index, values, part)))
            for block in part.cut(part.tensor):
                sizes = zip(block.offset, block.values.shape, strict=True)
                where = tuple(slice(start, start + size) for start, size in sizes)
                block.values.detach().copy_(whole[where or ...])


def _kept_values(path: Path, index: Any, values: Any, part: Part) -> Any:
    known = index.get(part.name) if isinstance(index, dict) else None
    if not isinstance(known, dict) or known.get("shape") != list(part.shape) or type(known.get("start")) is not int:
        raise UsageError(
            f"{path} has no {part.name} of shape {part.shape}: pass names, or parts if it is split by hand"
        )
    end = known["start"] + prod(part.shape)
    if not 0 <= known["start"] <= end <= len(values):
        raise UsageError(f"{path / VALUES} is damaged: it ends before {part.name}; keep the weights again")
    return values[known["start"] : end].reshape(part.shape)
