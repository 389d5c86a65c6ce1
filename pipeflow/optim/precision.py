"""HalfPrecision: the precision that a model is trained in, as a value. Must not contain: how it is stepped."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

import torch
from torch.nn import functional
from torch.optim import Optimizer

from pipeflow.core.errors import UsageError
from pipeflow.optim.masters import MasterWeights
from pipeflow.optim.scaler import LossScaler
from pipeflow.runtime.pipeline import Pipeline

Mode = Literal["parameters", "autocast"]
"""What is in 16 bits: the parameters, with float32 masters that the optimizer steps; or the computations under
torch.autocast, with float32 parameters.
"""


@dataclass(frozen=True, slots=True)
class HalfPrecision:
    """A 16-bit dtype and how it is used.

    Args:
        mode: which numbers are in 16 bits; see `Mode`.
        dtype: torch.float16 or torch.bfloat16.
        scaling: options of the LossScaler that float16 needs.

    Raises UsageError for another mode or dtype, and for invalid options of the LossScaler.
    """

    mode: Mode
    dtype: torch.dtype = torch.float16
    scaling: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.mode not in get_args(Mode):
            modes = " or ".join(map(repr, get_args(Mode)))
            raise UsageError(f"the mode of 16-bit training must be {modes}, got {self.mode!r}")
        if self.dtype not in (torch.float16, torch.bfloat16):
            raise UsageError(f"the dtype of 16-bit training must be torch.float16 or torch.bfloat16, got {self.dtype}")
        self.scaler()  # checks its options

    @property
    def parameters(self) -> torch.dtype:
        """The dtype of the model's parameters."""
        return self.dtype if self.mode == "parameters" else torch.float32

    @property
    def autocast(self) -> torch.dtype | None:
        """The dtype to pass as `Pipeline(autocast=)`; None without autocast."""
        return self.dtype if self.mode == "autocast" else None

    def scaler(self) -> LossScaler | None:
        """Returns a new LossScaler for float16; None for bfloat16, which has float32's range and needs none."""
        return LossScaler(**self.scaling) if self.dtype == torch.float16 else None  # type: ignore[arg-type]  # it checks them

    def optimizer(self, model: Pipeline, optimizer: Optimizer) -> MasterWeights:
        """Wraps `optimizer` to step `model` in this precision. Raises UsageError if the device cannot compute in the
        dtype, or if the model's parameters have another dtype.
        """
        require_dtype(self.dtype, model.context.device)
        dtypes = {parameter.dtype for parameter in model.parameters()}
        if dtypes and self.parameters not in dtypes:
            raise UsageError(
                f"mode {self.mode!s} needs parameters in {self.parameters}, but the model's are in "
                f"{', '.join(sorted(map(str, dtypes)))}: convert the model before making its Pipeline"
            )
        return MasterWeights(model, optimizer, scaler=self.scaler())


def require_dtype(dtype: torch.dtype, device: torch.device) -> None:
    """Raises UsageError if `device` cannot compute in `dtype`; tries a matrix product and a normalization."""
    try:
        with torch.no_grad():
            probe = torch.ones(2, 2, dtype=dtype, device=device)
            functional.layer_norm(functional.linear(probe, probe), (2,))
    except (RuntimeError, TypeError) as error:
        raise UsageError(f"device {str(device)!r} cannot compute in {dtype} ({error}): use another dtype") from None
