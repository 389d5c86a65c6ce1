"""Peaks: FLOP/s of a rank's device according to its data sheet. Must not contain: the numbers, which are in
`planning/device.py`, or measurements.
"""

from __future__ import annotations

import torch

from pipeflow.planning.device import DEVICES
from pipeflow.runtime.pipeline import Pipeline

_SLOWER = {"laptop", "ti", "super", "d", "mig", "max"}  # names of other devices contain these words


def peak_of(name: str, dtype: torch.dtype, *, tf32: bool) -> float | None:
    """Peak FLOP/s of matrix products in `dtype` on the device that torch calls `name`; None if unknown.

    >>> peak_of("NVIDIA A100-SXM4-80GB", torch.bfloat16, tf32=False)
    312000000000000.0
    """
    words = set(name.lower().replace("-", " ").split())
    known = {model: set(model.split("-")) for model in DEVICES}
    fitting = [model for model, parts in known.items() if {part for part in parts if not part.endswith("gb")} <= words]
    if not fitting or words & _SLOWER:
        return None
    flops = DEVICES[max(fitting, key=lambda model: len(known[model] & words))].flops
    if dtype is torch.float32:
        return flops["tf32"] if tf32 and "tf32" in flops else flops["float32"]
    return flops.get({torch.bfloat16: "bf16", torch.float16: "fp16"}.get(dtype, ""))


def peak_flops(model: Pipeline) -> float | None:
    """Peak FLOP/s of this rank's device, in the precision of its stages; None if unknown."""
    if model.context.device.type != "cuda":
        return None
    parameter = next(model.parameters(), None)
    dtype = model.autocast or (torch.float32 if parameter is None else parameter.dtype)
    tf32 = torch.get_float32_matmul_precision() != "highest"
    return peak_of(torch.cuda.get_device_name(model.context.device), dtype, tf32=tf32)
