"""A GPU that is only pretended: tensors that say they are on `DEVICE` and lie in CPU memory, so that the engine takes
its branches for GPUs. A `Watch` sees what a rank asks of it: computations, and each time the host would wait for it.

Python sees the device, torch's C++ code sees the CPU. So autograd runs on the thread that calls it, as it does on a
CPU; on a GPU it uses a thread of its own, for which the caller waits.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing

DEVICE = torch.device("cuda", 0)
_CPU = torch.device("cpu")
_ATEN = torch.ops.aten

_SYNCHRONISING = {
    _ATEN._local_scalar_dense.default: "item",
    _ATEN.equal.default: "equal",
    _ATEN.nonzero.default: "nonzero",
    _ATEN.masked_select.default: "masked_select",
    _ATEN._unique2.default: "unique",
    _ATEN.bincount.default: "bincount",
    _ATEN.repeat_interleave.Tensor: "repeat_interleave",
}
"""The operators after which the host must know a value, by the name under which people know them."""

_COPYING = (_ATEN._to_copy.default, _ATEN.copy_.default)
_MIXING = (*_COPYING, _ATEN.index.Tensor, _ATEN.index_put_.default, _ATEN.set_.source_Tensor)  # take both devices


class OnDevice(Tensor):
    """A tensor that says it is on `DEVICE`. `held` has its values."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> OnDevice:
        made: OnDevice = Tensor._make_wrapper_subclass(
            cls,
            held.shape,
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device=_CPU,
        )
        made.held = held
        return made

    @property
    def device(self) -> torch.device:  # type: ignore[override]  # an attribute for mypy
        return DEVICE

    def record_stream(self, _: Any) -> None:
        """Does nothing: memory is not used again before it is freed."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """What torch's C++ code would do at once, since for it these tensors are on the CPU."""
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if func is Tensor.numpy:
                raise TypeError(f"can't convert a tensor on {DEVICE} to numpy")
            if func is Tensor.tolist:
                return _told("tolist", args[0]).tolist()
            if func is Tensor.cpu:
                return _ATEN._to_copy(args[0], device=_CPU)
            if func is Tensor.to and isinstance(args[0], OnDevice):
                target = kwargs.get("device", next(iter(args[1:]), None))
                if isinstance(target, str | torch.device) and torch.device(target) == _CPU:
                    non_blocking = kwargs.pop("non_blocking", False)
                    kwargs.pop("copy", None)  # it is one
                    return _ATEN._to_copy(args[0], device=_CPU, non_blocking=non_blocking).to(*args[1:], **kwargs)
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]  # static for mypy
        return _run(func, args, kwargs or {})

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"OnDevice({_told('repr', self)})"

    def __format__(self, spec: str) -> str:
        return format(repr(self) if self.dim() else self.item(), spec)


class Watch(TorchDispatchMode):
    """Sees the computations of this thread. `computed()` is called for each operator on the device, `waited(why)` when
    the host waits for it.
    """

    def __init__(self, computed: Callable[[], None], waited: Callable[[str], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # as torch has it
        self.computed, self.waited = computed, waited

    def __enter__(self) -> Any:
        _HERE.watch = self
        torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor(device=) then copies where this mode sees it
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: object) -> None:
        _HERE.watch = None
        torch._C._set_only_lift_cpu_tensors(False)
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = _tensors([args, list(kwargs.values())])
        on_device = _is_there(kwargs.get("device")) or any(isinstance(each, OnDevice) for each in given)
        return _run(func, args, kwargs) if on_device else func(*args, **kwargs)


class _Here(threading.local):
    watch: Watch | None = None
    stream: _Stream | None = None  # the current one, if it is not the default one


_HERE = _Here()


def _is_there(device: Any) -> bool:
    return device is not None and torch.device(device).type == DEVICE.type


def _tensors(tree: Any) -> Iterator[Tensor]:
    """The tensors among an operator's arguments, which are nested in lists and tuples alone."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, list | tuple):
        for each in tree:
            yield from _tensors(each)


def _held(tree: Any) -> Any:
    if isinstance(tree, list | tuple):
        return type(tree)(map(_held, tree))
    return tree.held if isinstance(tree, OnDevice) else tree


def _wrapped(tree: Any) -> Any:
    if isinstance(tree, list | tuple):
        return type(tree)(map(_wrapped, tree))
    return OnDevice(tree) if isinstance(tree, Tensor) else tree


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Runs an operator that concerns the device on the tensors held, and tells the thread's Watch."""
    watch, why = _HERE.watch, _waits(func, args, kwargs)
    if watch is not None:
        watch.computed()
        if why:
            watch.waited(why)
    plain = {name: _CPU if name == "device" else _held(each) for name, each in kwargs.items()}
    result = func(*_held(args), **plain)
    if func is _ATEN._to_copy.default and _leaves_device(kwargs):
        return _late(result, args[0].held) if kwargs.get("non_blocking") else result
    if func is _ATEN.copy_.default and not isinstance(args[0], OnDevice):
        return args[0]
    return return_and_correct_aliasing(func, args, kwargs, _wrapped(result))


def _leaves_device(kwargs: dict[str, Any]) -> bool:
    """Of a conversion. Autograd, in C++, names the CPU for that of a gradient, which stays; it names a layout, too."""
    return kwargs.get("device") is not None and not _is_there(kwargs["device"]) and "layout" not in kwargs


def _waits(func: Any, args: Any, kwargs: dict[str, Any]) -> str:
    """Why the host waits for the device in this operator; empty if it does not. Raises RuntimeError where a GPU does,
    for tensors on two devices.
    """
    outside = [each for each in _tensors([args, list(kwargs.values())]) if not isinstance(each, OnDevice)]
    if func is _ATEN._to_copy.default:
        moves = bool(outside) or _leaves_device(kwargs)
        return "" if not moves or kwargs.get("non_blocking") else "a copy between devices"
    if func is _ATEN.copy_.default:
        non_blocking = kwargs.get("non_blocking", args[2:3] == (True,))
        return "a copy between devices" if outside and not (non_blocking and outside[0] is not args[0]) else ""
    if func in _MIXING:
        if any(each.dim() for each in outside):
            return "a copy between devices"
        return "a mask as an index" if any(each.dtype is torch.bool for each in _tensors(args[1])) else ""
    if any(each.dim() for each in outside):
        raise RuntimeError(f"{func}: expected all tensors to be on the same device")
    return _SYNCHRONISING.get(func, "")


def _told(why: str, tensor: Any) -> Tensor:
    if _HERE.watch is not None:
        _HERE.watch.waited(why)
    held: Tensor = tensor.held
    return held


_LATE: list[tuple[Tensor, Tensor]] = []  # tensors in pinned memory that the device still writes, and their values


def _late(values: Tensor, held: Tensor) -> Tensor:
    """A tensor in pinned memory; it has its values when the host has waited for the device. If it is laid out neither
    like `held` nor contiguously, torch copies what it has to there at once, so it never has them.
    """
    made = torch.full_like(values, torch.nan if values.is_floating_point() else 0)
    if made.is_contiguous() or made.stride() == held.stride():
        _LATE.append((made, values))
    return made


def _write(late: list[tuple[Tensor, Tensor]]) -> None:
    for made, values in late:
        made.copy_(values)


class _Event:
    """A moment of the device, which is always done, except for copies to pinned memory."""

    def __init__(self, **_: object) -> None:
        self.moment = 0.0
        self._late: list[tuple[Tensor, Tensor]] = []

    def record(self, *_: object) -> None:
        self.moment = time.perf_counter()
        self._late = list(_LATE)

    def query(self) -> bool:
        """What is issued is done at once."""
        return True

    def synchronize(self) -> None:
        """Does not count as a wait. The engine waits only for events of the step before."""
        _write(self._late)

    def elapsed_time(self, end: _Event) -> float:
        """Milliseconds."""
        return 1000 * (end.moment - self.moment)


class _Stream:
    """A stream of the device."""

    def __init__(self, *_: object) -> None:
        """Takes a device, of which there is one."""

    def wait_stream(self, _: _Stream) -> None:
        """Does nothing: what is issued is done at once."""

    def wait_event(self, _: _Event) -> None:
        """As `wait_stream`."""

    def record_event(self, event: _Event | None = None) -> _Event:
        event = event or _Event()
        event.record()
        return event

    def synchronize(self) -> None:
        _synchronize()


def _synchronize(*_: object) -> None:
    _write(_LATE)
    if _HERE.watch is not None:
        _HERE.watch.waited("synchronize")


@contextmanager
def pretended() -> Iterator[None]:
    """Context manager in which torch.cuda is that of the pretended GPU, for all threads."""

    @contextmanager
    def device(*_: object) -> Iterator[None]:
        yield

    @contextmanager
    def stream(chosen: _Stream) -> Iterator[None]:
        before, _HERE.stream = _HERE.stream, chosen
        try:
            yield
        finally:
            _HERE.stream = before

    fakes: dict[str, Any] = {"synchronize": _synchronize, "Event": _Event, "Stream": _Stream}
    fakes["get_rng_state"] = lambda *_: torch.get_rng_state()
    fakes |= {"device": device, "stream": stream, "current_stream": lambda *_: _HERE.stream or _Stream()}
    here = patch(
        "pipeflow.engine.runtime.pipeline.place", lambda module, _: moved(module)
    )  # Module.to keeps CPU parameters
    group = Optimizer._group_tensors_by_device_and_dtype

    def grouped(tensors: list[list[Tensor | None]], *options: bool) -> dict[Any, Any]:
        """Fused optimizers move numbers to the device of their tensors, which torch's C++ code names."""
        there = isinstance(tensors[0][0], OnDevice)
        return {(DEVICE if there else on, dtype): each for (on, dtype), each in group(tensors, *options).items()}

    optimizers = patch.object(Optimizer, "_group_tensors_by_device_and_dtype", staticmethod(grouped))
    with patch.multiple(torch.cuda, _lazy_init=lambda: None, **fakes), here, optimizers:
        yield
    _LATE.clear()


def is_beside() -> bool:
    """Whether this thread's current stream is another one than the default one, on which all others compute."""
    return _HERE.stream is not None


Module = TypeVar("Module", bound=nn.Module)


def moved(module: Module) -> Module:
    """The same module, with its parameters and buffers on the device. Parameters that are one stay one."""
    made: dict[int, nn.Parameter] = {}
    for owner in module.modules():
        for name, parameter in owner._parameters.items():
            if parameter is not None and not isinstance(parameter, OnDevice):
                there = made.setdefault(
                    id(parameter), nn.Parameter(OnDevice(parameter.detach()), requires_grad=parameter.requires_grad)
                )
                vars(there).update(vars(parameter))
                owner._parameters[name] = there
        for name, buffer in owner._buffers.items():
            if buffer is not None:
                owner._buffers[name] = OnDevice(buffer)
    return module
