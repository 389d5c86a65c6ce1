"""Functions of tensors, the class of convolutions, and states of random generators."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from sys import getrefcount
from threading import RLock
from typing import Any

import torch
from torch import Generator, Tensor

from pipeflow.engine.torch_private import needed

Function = Callable[..., Any]

with needed():
    foreach_add_: Function = torch._foreach_add_
    foreach_addcmul_: Function = torch._foreach_addcmul_
    foreach_copy_: Function = torch._foreach_copy_
    foreach_div_: Function = torch._foreach_div_
    foreach_lerp_: Function = torch._foreach_lerp_
    foreach_mul: Function = torch._foreach_mul
    foreach_mul_: Function = torch._foreach_mul_
    foreach_norm: Function = torch._foreach_norm
    foreach_reciprocal_: Function = torch._foreach_reciprocal_
    foreach_sqrt: Function = torch._foreach_sqrt
    foreach_sub_: Function = torch._foreach_sub_
    foreach_zero_: Function = torch._foreach_zero_
    assert_async: Callable[[Tensor], None] = torch._assert_async
    disable_dynamo: Function = torch._disable_dynamo
    make_subclass: Function = torch.Tensor._make_subclass
    make_wrapper: Function = torch.Tensor._make_wrapper_subclass
    no_torch_function: Any = torch._C._disabled_torch_function_impl
    keep_device_guard: Callable[[], None] = torch._C._ensureCUDADeviceGuardSet
    keep_version: Function = torch.autograd._unsafe_preserve_version_counter
    from torch._ops import OpOverload

    has_bf16_units: Callable[[], bool] = torch.cpu._is_avx512_bf16_supported
    GROUPED_MM: Any = torch.ops.aten._grouped_mm.default
    LOCAL_SCALAR: Any = torch.ops.aten._local_scalar_dense.default
    PACK_PADDED: Any = torch.ops.aten._pack_padded_sequence.default
    UNSAFE_INDEX: Any = torch.ops.aten._unsafe_index.Tensor
    _unsafe_view: Any = torch.ops.aten._unsafe_view
    _storage_uses: Callable[[int], int] = torch._C._storage_Use_Count
    storage_types: Callable[[], dict[torch.dtype, str]] = torch.storage._dtype_to_storage_type_map
    called_by_functional: Any = torch._C._nn
    from torch.nn.modules.conv import _ConvNd as Convolution

CPU_FLASH: Function | None = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", None)
CPU_FLASH_BACKWARD: Function | None = getattr(
    torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu_backward", None
)


def unviewed(tensor: Tensor) -> Tensor:
    """The same values, but not as a view: torch forbids writing in place to a view that a custom function returns. The
    public `clone` copies.
    """
    return _unsafe_view(tensor, tensor.shape) if tensor._is_view() else tensor


def storage_key(tensor: Tensor) -> int:
    """Tells memory of tensors apart, also where it has no address, as on the meta device."""
    key: int = tensor.untyped_storage()._cdata
    return key


def holders(tensor: Tensor) -> int:
    """The number of tensors and other objects that hold its memory, including itself. Nothing public counts them."""
    uses, references = _uses(tensor)
    return 1 + uses - _ALONE[0] + references - _ALONE[1]


def _uses(tensor: Tensor) -> tuple[int, int]:
    """How many hold the memory of a tensor, and its storage's only object of Python."""
    storage = tensor.untyped_storage()
    return _storage_uses(storage._cdata), getrefcount(storage)


_ALONE = _uses(torch.empty(0, device="cpu"))

__all__ = [
    "CPU_FLASH",  # attention with its log-sum-exp, which nothing public returns; None: attention has a mask then
    "CPU_FLASH_BACKWARD",
    "GROUPED_MM",  # aten's operators, which have no other names
    "LOCAL_SCALAR",
    "PACK_PADDED",
    "UNSAFE_INDEX",
    "Convolution",  # the base of Conv1d, Conv2d and Conv3d
    "OpOverload",  # the class of aten's operators
    "assert_async",  # an error that doesn't wait for the device; documented, and private by name
    "called_by_functional",  # the module of functions that torch.nn.functional calls
    "disable_dynamo",  # torch.compiler.disable, which would import the compiler at once
    "foreach_add_",  # one kernel for a list of tensors; documented, and private by name
    "foreach_addcmul_",
    "foreach_copy_",
    "foreach_div_",
    "foreach_lerp_",
    "foreach_mul",
    "foreach_mul_",
    "foreach_norm",
    "foreach_reciprocal_",
    "foreach_sqrt",
    "foreach_sub_",
    "foreach_zero_",
    "has_bf16_units",  # of this CPU; nothing public says so
    "holders",
    "keep_version",  # writes in place that backwards need not know of; nothing public
    "make_subclass",  # a tensor as one of a subclass that is a parameter; nothing public shares its memory
    "make_wrapper",  # a tensor of a subclass without memory; nothing public
    "no_torch_function",  # of a subclass that sees operators, not functions; nothing public
    "storage_key",
    "storage_types",  # the names of the storages in the files of torch.save, by dtype
    "unviewed",
]


# torch holds a generator's mutex while it makes the Python object of a state. There Python may collect garbage, and
# what that calls may let another thread go on. If that thread asks for a state too, it waits for the mutex and keeps
# the interpreter's lock: the process stands still. So threads take turns.
_TURN = RLock()  # what a collection calls may ask for another generator's state


def state_of(generator: Generator) -> Tensor:
    """Returns a copy of the state of one generator."""
    with _TURN:
        return generator.get_state()


def default_states(gpus: Sequence[torch.device] = ()) -> list[Tensor]:
    """Returns the states of the default generators of the CPU and of some GPUs."""
    with _TURN:
        return [torch.get_rng_state(), *map(torch.cuda.get_rng_state, gpus)]


def set_default_states(states: Sequence[Tensor], gpus: Sequence[torch.device] = ()) -> None:
    """Sets these generators to states that `default_states` returned."""
    with _TURN:
        torch.set_rng_state(states[0])
        for gpu, state in zip(gpus, states[1:], strict=True):
            torch.cuda.set_rng_state(state, gpu)
