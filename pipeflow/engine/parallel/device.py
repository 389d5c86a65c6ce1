"""Device: chooses the device on which this process computes, and sets environment variables that CUDA, NCCL and torch
read when they begin.
"""

from __future__ import annotations

import logging
import os

import torch

from pipeflow.core.errors import UsageError

LOG = logging.getLogger("pipeflow")

_CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
_ERROR_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
DEFAULTS = {
    _CONNECTIONS: "32",  # queues of the device: a send must not wait in one queue behind a receive
    "CUDA_MODULE_LOADING": "EAGER",  # to load a kernel may wait for the device, which may wait for a receive
    "NCCL_RUNTIME_CONNECT": "0",  # a group connects all algorithms when it is made, not when it first uses one
    _ERROR_HANDLING: "0",  # else torch ends the process before it can raise the error
    "TORCH_NCCL_ENABLE_MONITORING": "0",  # as above, for torch's second thread
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "1000",  # a group is closed after four times this time following an error
    "TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING": "0",  # each group has one channel
}
"""Environment variables that `prepare` sets unless they are set."""


def prepare(asked: torch.device | str | None) -> None:
    """Sets the environment variables of `DEFAULTS` if this process may compute on a GPU among other processes. Call it
    before CUDA is used.

    Raises UsageError for settings under which ranks would wait for each other forever.
    """
    if not torch.backends.cuda.is_built() or (asked is not None and torch.device(asked).type != "cuda"):
        return
    queues = os.environ.get(_CONNECTIONS, DEFAULTS[_CONNECTIONS])
    if not queues.isdecimal() or int(queues) < int(DEFAULTS[_CONNECTIONS]):
        raise UsageError(
            f"{_CONNECTIONS} is {queues}, so a send may wait forever behind a receive on the same GPU: unset it, or "
            f"set it to {DEFAULTS[_CONNECTIONS]}"
        )
    if torch.cuda.is_initialized() and _CONNECTIONS not in os.environ:
        LOG.warning("CUDA was used before launch, which sets %s and others too late: call launch first", _CONNECTIONS)
    if os.environ.get(_ERROR_HANDLING) == "1" and "TORCHELASTIC_RUN_ID" in os.environ:
        del os.environ[_ERROR_HANDLING]  # torchrun sets it for everybody
    for name, value in DEFAULTS.items():
        os.environ.setdefault(name, value)
    if os.environ[_ERROR_HANDLING] != "0":
        LOG.warning(
            "%s is %s: if a rank fails, torch may end this process before it raises the error; unset it",
            _ERROR_HANDLING,
            os.environ[_ERROR_HANDLING],
        )


def synchronize(device: torch.device) -> None:
    """Waits until a device has finished its work. A CPU has finished when its functions return."""
    if device.type not in ("cpu", "meta"):
        torch.accelerator.synchronize(device)


def own_device(asked: torch.device | str | None) -> torch.device:
    """The device of this process; a GPU becomes torch's current device.

    If `asked` is "cuda", or if it is None and there are GPUs, the process gets the GPU with its LOCAL_RANK, or the only
    one that it sees. Raises UsageError for a GPU that does not exist, and for devices on which pipeflow does not
    compute.
    """
    device = torch.device(asked or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.type not in ("cpu", "cuda"):
        raise UsageError(f"pipeflow computes on 'cpu' and on 'cuda', not on {str(device)!r}")
    if device.type == "cpu":
        return device
    count = torch.cuda.device_count()
    if not count:
        raise UsageError(
            f"device {str(device)!r} was given, but torch finds no GPU: check CUDA_VISIBLE_DEVICES and that torch is "
            "built for CUDA, or pass device='cpu'"
        )
    only = 0 if count == 1 else int(os.environ.get("LOCAL_RANK", 0))  # as when srun gives each task its own GPU
    index = only if device.index is None else device.index
    if index >= count:
        raise UsageError(
            f"this process has LOCAL_RANK {index} but sees {count} GPUs: start at most one process per GPU, or let "
            "each process see one GPU of its own"
            if device.index is None
            else f"device {str(device)!r} was given, but this process sees {count} GPUs"
        )
    torch.cuda.set_device(index)
    return torch.device("cuda", index)
