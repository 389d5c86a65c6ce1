"""Modes that see each operator, and fake tensors, which have a shape and no values.

Public alternatives: none for modes below autograd (`torch.overrides.TorchFunctionMode` sees calls of functions, not
operators) and for fake tensors; `torch.device("meta")` forgets the device.
"""

from __future__ import annotations

from pipeflow.engine.torch_private import needed

with needed():
    from torch._subclasses.fake_tensor import (
        DataDependentOutputException,
        DynamicOutputShapeException,
        FakeTensor,
        FakeTensorMode,
    )
    from torch.utils._mode_utils import no_dispatch
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._python_dispatch import _disable_current_modes as disable_current_modes

FAKE_LOGGER = FakeTensor.__module__
"""The name of the logger that receives what fails on fake tensors, beside the error."""

__all__ = [
    "FAKE_LOGGER",
    "DataDependentOutputException",
    "DynamicOutputShapeException",
    "FakeTensor",
    "FakeTensorMode",
    "TorchDispatchMode",
    "disable_current_modes",
    "no_dispatch",  # operators below a tensor subclass that sees each of them; nothing public
]
