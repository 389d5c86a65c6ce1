"""A second type of device whose tensors have values: torch's PrivateUse1, in Python. Its memory is the CPU's, and its
kernels are the CPU's; but as on a GPU, an operator refuses tensors of two devices, and a copy to the CPU is a wait.

torch's C++ code sees the device, too: tensors and parameters are plain ones. To register it changes the whole process,
so tests use it in processes of their own.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

NAME = "second"

WAITS: Counter[str] = Counter()
"""How often the host waited for the device, by the line that made it wait."""

_CPU = torch.device("cpu")
_ON_CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
_SET = torch.ops.aten.set_.source_Storage_storage_offset
_MIXING = ("aten::copy_", "aten::_to_copy", "aten::index", "aten::index_put_", "aten::_index_put_impl_", "aten::set_")
_CASTING = ("linear", "matmul", "mm", "bmm", "addmm", "scaled_dot_product_attention")  # some that autocast rounds for
_AUTOCAST = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)  # type: ignore[attr-defined]
_MANY = 1000  # allocations after which freed memory is looked for


class _Device:
    """The functions of `torch.second`, as those of `torch.cuda`."""

    is_initialized = is_available = staticmethod(lambda: True)
    _is_in_bad_fork = staticmethod(lambda: False)
    current_device = staticmethod(lambda: 0)
    device_count = staticmethod(lambda: 1)
    get_amp_supported_dtype = staticmethod(lambda: [torch.bfloat16, torch.float16])
    get_rng_state = staticmethod(lambda *_: torch.get_rng_state())
    set_rng_state = staticmethod(lambda state, *_: torch.set_rng_state(state))

    @staticmethod
    def manual_seed_all(_: int) -> None:
        """Does nothing: random numbers are those of the CPU."""

    set_device = synchronize = manual_seed_all


class _Memory:
    """CPU memory under the device's name. It lives as long as a storage of the device does."""

    def __init__(self) -> None:
        self._owners: list[tuple[StorageWeakRef, Any]] = []
        self._most = _MANY
        self._lock = threading.Lock()  # backwards run on a thread of the device

    def named(self, plain: Any) -> Any:
        """The storage of the device that is this memory."""
        made = torch._C._construct_storage_from_data_pointer(plain.data_ptr(), torch.device(NAME, 0), plain.nbytes())
        with self._lock:
            self._owners.append((StorageWeakRef(made), plain))
            if len(self._owners) > self._most:
                self._owners = [owner for owner in self._owners if not owner[0].expired()]
                self._most = _MANY + 2 * len(self._owners)
        return made


_MEMORY = _Memory()


def is_there(tensor: object) -> bool:
    """Whether a tensor is on the device."""
    return isinstance(tensor, Tensor) and tensor.device.type == NAME


def plain(tensor: Tensor) -> Tensor:
    """A tensor's memory as a tensor of the CPU."""
    storage = tensor.untyped_storage()
    if not storage.nbytes():  # an operator may give it another size
        return torch.empty(tensor.shape, dtype=tensor.dtype)
    memory = torch._C._construct_storage_from_data_pointer(storage.data_ptr(), _CPU, storage.nbytes())
    return torch.empty(0, dtype=tensor.dtype).set_(memory, tensor.storage_offset(), tensor.size(), tensor.stride())


def _there(tensor: Tensor, storage: torch.UntypedStorage | None = None) -> Tensor:
    """A CPU tensor's memory as a tensor of the device; of `storage`, if that is this memory already."""
    made = torch._C._acc.create_empty_tensor((0,), tensor.dtype)
    return _laid(made, tensor, storage)


def _laid(made: Tensor, like: Tensor, storage: torch.UntypedStorage | None = None) -> Tensor:
    storage = _MEMORY.named(like.untyped_storage()) if storage is None else storage
    laid: Tensor = _SET.redispatch(_ON_CPU, made, storage, like.storage_offset(), like.size(), like.stride())
    return laid


def _run(operator: Any, *args: Any, **kwargs: Any) -> Any:
    """Runs an operator of the CPU on the memory of the device's tensors."""
    name = operator._schema.name
    if name == "aten::set_":
        return operator.redispatch(_ON_CPU, *args, **kwargs)
    _require_together(operator, name, tree_leaves((args, kwargs)))
    held: dict[int, tuple[Tensor, Tensor]] = {}  # by the tensor: it, and its memory

    def enter(each: Any) -> Any:
        if is_there(each):
            return held.setdefault(id(each), (each, plain(each)))[1]
        return _CPU if isinstance(each, torch.device) and each.type == NAME else each

    own_args, own_kwargs = tree_map(enter, (args, kwargs))
    numbers = any(  # torch unpacks a number that takes the place of a tensor, such as that in `tensor & 1`
        isinstance(each.type, torch.TensorType) and isinstance(value, int | float | complex)
        for each, value in zip(operator._schema.arguments, args, strict=False)
    )
    result = (operator.overloadpacket if numbers else operator)(*own_args, **own_kwargs)
    if name == "aten::_local_scalar_dense":
        _waited()
        return result
    for mine, memory in held.values():  # an operator may have given its output another size
        if _address(memory) != _address(mine):
            _laid(mine, memory)
        elif memory.shape != mine.shape:
            _laid(mine, memory, mine.untyped_storage())  # which keeps the memory
    mine_of = {id(memory): mine for mine, memory in held.values()}
    storages = {_address(mine): mine.untyped_storage() for mine, _ in held.values() if _address(mine)}

    def leave(each: Any) -> Any:
        if not isinstance(each, Tensor):
            return each
        return mine_of[id(each)] if id(each) in mine_of else _there(each, storages.get(_address(each)))

    return tree_map(leave, result)


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _require_together(operator: Any, name: str, leaves: list[Any]) -> None:
    outside = [each for each in leaves if isinstance(each, Tensor) and not is_there(each) and each.dim()]
    if outside and name not in _MIXING:
        raise RuntimeError(f"{operator}: expected all tensors to be on the same device, found {NAME} and cpu")


def _copy(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
    if not is_there(target):
        _waited()
    (plain(target) if is_there(target) else target).copy_(plain(source) if is_there(source) else source)
    return target


def _empty(size: Any, dtype: Any = None, *_: Any, memory_format: Any = None, **__: Any) -> Tensor:
    return _there(torch.empty(size, dtype=dtype, memory_format=memory_format or torch.contiguous_format))


def _empty_strided(size: Any, stride: Any, dtype: Any = None, *_: Any, **__: Any) -> Tensor:
    return _there(torch.empty_strided(size, stride, dtype=dtype))


def _waited() -> None:
    frame = sys._getframe(1)
    while frame.f_back is not None and (frame.f_code.co_filename == __file__ or "/torch/" in frame.f_code.co_filename):
        frame = frame.f_back
    WAITS[f"{frame.f_code.co_filename}:{frame.f_lineno}"] += 1


def _clone(storage: Any, clone: Any = torch.UntypedStorage.clone) -> Any:
    if storage.device.type != NAME:
        return clone(storage)
    memory = torch._C._construct_storage_from_data_pointer(storage.data_ptr(), _CPU, storage.nbytes())
    return _MEMORY.named(clone(memory))


def _autocast(name: str) -> Any:
    def run(*args: Any, **kwargs: Any) -> Any:
        dtype = torch.get_autocast_dtype(NAME)

        def rounded(each: Any) -> Any:
            return each.to(dtype) if is_there(each) and each.dtype is torch.float32 else each

        with torch._C._ExcludeDispatchKeyGuard(_AUTOCAST):
            return getattr(torch.ops.aten, name)(*tree_map(rounded, args), **tree_map(rounded, kwargs))

    return run


_LIBRARIES: list[torch.library.Library] = []  # what they register lasts as long as they do


def register() -> torch.device:
    """Makes the device known to torch in this process, and returns it."""
    if not _LIBRARIES:
        _setup_privateuseone_for_python_backend(NAME, backend_module=_Device())
        every, aten = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
        every.fallback(_run, "PrivateUse1")
        every.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
        for name in _CASTING:
            aten.impl(name, _autocast(name), "AutocastPrivateUse1")
        for name, function in {
            "empty.memory_format": _empty,
            "empty_strided": _empty_strided,
            "_copy_from": _copy,
        }.items():
            aten.impl(name, function, "PrivateUse1")
        _LIBRARIES.extend((every, aten))
        torch.UntypedStorage.clone = _clone  # type: ignore[method-assign]  # torch has no hook for it
        torch.__future__.set_swap_module_params_on_conversion(
            True
        )  # moved parameters stay the same objects, as on GPUs
    return torch.device(NAME, 0)
