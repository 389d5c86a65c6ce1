"""Precision: in which numbers a model is trained, as a value. What must not live here: how it is stepped."""

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
"""What is in 16 bits: the parameters, of which the optimizer steps float32 masters; or what torch.autocast computes,
while the parameters are in float32.
"""


@dataclass(frozen=True, slots=True)
class HalfPrecision:
    """The 16-bit type and how it is used. `scaling` are the options of the LossScaler that float16 needs.

    Raises UsageError for another mode, for a dtype that is neither float16 nor bfloat16, and for options that a
    LossScaler refuses.
    """

    mode: Mode
    dtype: torch.dtype = torch.float16
    scaling: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.mode not in get_args(Mode):
            modes = " or ".join(map(repr, get_args(Mode)))
            raise UsageError(f"training in 16 bits takes mode {modes}, got {self.mode!r}")
        if self.dtype not in (torch.float16, torch.bfloat16):
            raise UsageError(f"training in 16 bits takes torch.float16 or torch.bfloat16, got {self.dtype}")
        self.scaler()  # refuses options that make no sense

    @property
    def parameters(self) -> torch.dtype:
        """That of the model's parameters."""
        return self.dtype if self.mode == "parameters" else torch.float32

    @property
    def autocast(self) -> torch.dtype | None:
        """For the Pipeline's argument of that name."""
        return self.dtype if self.mode == "autocast" else None

    def scaler(self) -> LossScaler | None:
        """A new one, for float16; bfloat16 has float32's range and needs none."""
        return LossScaler(**self.scaling) if self.dtype == torch.float16 else None  # type: ignore[arg-type]  # it checks them

    def optimizer(self, model: Pipeline, optimizer: Optimizer) -> MasterWeights:
        """What steps `model` in this precision, by `optimizer`. Raises UsageError as `require_dtype` does, and for a
        model whose parameters are of another dtype.
        """
        require_dtype(self.dtype, model.context.device)
        dtypes = {parameter.dtype for parameter in model.parameters()}
        if dtypes and self.parameters not in dtypes:
            raise UsageError(
                f"mode {self.mode!s} steps parameters in {self.parameters}, and the model's are in "
                f"{', '.join(sorted(map(str, dtypes)))}: convert it before its Pipeline is made"
            )
        return MasterWeights(model, optimizer, scaler=self.scaler())


def require_dtype(dtype: torch.dtype, device: torch.device) -> None:
    """Raises UsageError where `device` cannot compute in `dtype`: it tries, with a product and a normalization."""
    try:
        with torch.no_grad():
            probe = torch.ones(2, 2, dtype=dtype, device=device)
            functional.layer_norm(functional.linear(probe, probe), (2,))
    except (RuntimeError, TypeError) as error:
        raise UsageError(f"device {str(device)!r} cannot compute in {dtype} ({error}): use another dtype") from None
