"""Peaks: the operations per second that a device is sold with. What must not live here: what is measured."""

from __future__ import annotations

import torch

from pipeflow.runtime.pipeline import Pipeline

PEAKS: dict[str, tuple[float, float, float]] = {  # TFLOP/s of dense products: 16 bits, TF32, float32
    "V100": (125.0, 15.7, 15.7),
    "V100 PCIE": (112.0, 14.0, 14.0),
    "T4": (65.0, 8.1, 8.1),
    "A10": (125.0, 62.5, 31.2),
    "A100": (312.0, 156.0, 19.5),
    "L4": (121.0, 60.0, 30.3),
    "L40S": (362.0, 183.0, 91.6),
    "H100 PCIe": (756.0, 378.0, 51.0),
    "H100 NVL": (835.0, 417.0, 60.0),
    "H100": (989.0, 494.0, 67.0),
    "H200": (989.0, 494.0, 67.0),
}
"""By a part of the name that torch has for the device. Sources: NVIDIA's data sheets of these GPUs."""


def peak_of(name: str, dtype: torch.dtype, *, tf32: bool) -> float | None:
    """FLOP/s of a device of that name in products of `dtype`, None where they are not known.

    >>> peak_of("NVIDIA A100-SXM4-80GB", torch.bfloat16, tf32=False)
    312000000000000.0
    """
    words = name.replace("-", " ").split()
    models = [model for model in PEAKS if set(model.split()) <= set(words)]
    if not models:
        return None
    half, fast, single = PEAKS[max(models, key=len)]
    known = {torch.bfloat16: half, torch.float16: half, torch.float32: fast if tf32 else single}
    if dtype is torch.bfloat16 and {"V100", "T4"} & set(words):  # they have no units for it
        return None
    return known[dtype] * 1e12 if dtype in known else None


def peak_flops(model: Pipeline) -> float | None:
    """FLOP/s of the device that this rank's stages compute on, in their precision; None where it is not known."""
    if model.context.device.type != "cuda":
        return None
    parameter = next(model.parameters(), None)
    dtype = model.autocast or (torch.float32 if parameter is None else parameter.dtype)
    tf32 = torch.get_float32_matmul_precision() != "highest"
    return peak_of(torch.cuda.get_device_name(model.context.device), dtype, tf32=tf32)
