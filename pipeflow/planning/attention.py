"""Attention: the kernels that compute it, and the shares of a device's peak that they reach by sequence and head. Must
not contain: what else a layer computes, or the choice of a kernel for a setup.

Shares are those of the papers of FlashAttention, for causal attention with heads of 128 as sequences grow, where a
kernel computes what the mask leaves alone.

- flash1 (arXiv 2205.14135) on A100: 30 to 50 % in the forward and 25 to 35 % in the backward, as the introduction of
  arXiv 2307.08691 says. The shares here are those of Triton's kernel, which are among them: flash2 is 1.3 to 1.5 times
  as fast in the forward and twice in the backward (section 4.1).
- flash2 (arXiv 2307.08691) on A100: up to 73 and 63 % without a mask, 189 of 312 TFLOP/s of both with it.
- Both are written with the instructions of A100, with which H100 reaches .54 of that share: 335 of 989 TFLOP/s (arXiv
  2307.08691, section 4.1) beside 189 to 203 of 312. On Blackwell, programs have kernels of its own.
- flash3 (arXiv 2407.08608) and cuDNN's kernels on H100: 1.5 to 2 times flash2's forward, and 1.5 to 1.75 times its
  backward. On Blackwell the kernels of their kind reach 1,418 and 1,209 of 2,250 TFLOP/s at 8,192 tokens
  (flash-attention's pull request 2280). Steps of training hold the power of B200 longer, in which products reach .86 of
  what short measurements say, so attention is taken to reach as much less. On A100 there is none, and flash2 runs.

Short sequences reach less: the rates of figure 4 of arXiv 2307.08691 follow 1 / (1 + 440 / tokens) with a causal mask,
whose diagonal is computed in whole tiles, and 1 / (1 + 170 / tokens) without. Small heads reach less, since each score
takes an exponential: arXiv 2407.08608, section 3.1, counts 3.9e12 of them per second beside 989e12 operations on H100,
so in a forward an exponential takes as long as 63 numbers of a head, of which flash3 hides about half. Kernels have
heads of multiples of 32 numbers and fill up others.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal, NamedTuple

Kernel = Literal["unfused", "flash1", "flash2", "flash3"]
KERNELS: tuple[Kernel, ...] = ("unfused", "flash1", "flash2", "flash3")
FUSED_BACKWARD = 2.5  # products for each one of the forward: five for two, since scores are computed again
RAMP_CAUSAL, RAMP = 440.0, 170.0  # tokens at which a fused kernel takes twice as long for each score
USUAL_HEAD = 128.0  # of SHARES
HEAD_STEP = 32  # the heads of fused kernels are multiples of it
ALIGNED = 8  # numbers of 16 bits in the 16 bytes that a product loads at once
UNALIGNED = 2.0  # times as long where a head is no multiple of ALIGNED: NVIDIA's guide to matrix products, section 2.2


class Scores(NamedTuple):
    """The shape of attention.

    Attributes:
        kernel: what computes it; None for the `fastest` one of the device.
        tokens: tokens that a query sees, but for the mask.
        head: width of a head.
        is_causal: whether a query sees only what precedes it.
    """

    kernel: Kernel | None
    tokens: float
    head: float
    is_causal: bool


class Shares(NamedTuple):
    """Shares of the peak in a forward and in a backward."""

    forward: float
    backward: float


_AMPERE = {"flash1": Shares(0.48, 0.29), "flash2": Shares(0.67, 0.58), "flash3": Shares(0.67, 0.58)}
_HOPPER = {"flash1": Shares(0.259, 0.157), "flash2": Shares(0.36, 0.313), "flash3": Shares(0.64, 0.53)}
_BLACKWELL = dict.fromkeys(("flash1", "flash2", "flash3"), Shares(0.55, 0.47))
_SCALED = {"a100-pcie": 0.93, "mi250x": 0.885, "mi300x": 0.69}  # as their products, since nobody published more
SHARES: Mapping[str, Mapping[str, Shares]] = MappingProxyType(
    {"a100": _AMPERE, "h100": _HOPPER, "b200": _BLACKWELL}
    | {
        like: {kernel: Shares(part * each.forward, part * each.backward) for kernel, each in _AMPERE.items()}
        for like, part in _SCALED.items()
    }
)
"""By the measured device (`Device.like`) and the kernel. Other devices are as A100."""

EXPONENTIAL: Mapping[str, float] = MappingProxyType({"a100": 25.0, "h100": 30.0, "b200": 60.0})
"""By the measured device: how many numbers of a head take as long as what is not hidden of a score's exponential. The
whole of it is 32 on A100, which has 16 units in each of 108 multiprocessors at 1.41 GHz, and 128 on B200."""


def fastest(like: str) -> Kernel:
    """The fastest kernel of a device that is like `like`: flash3, or cuDNN's, is for Hopper and what came after it."""
    return "flash3" if like in ("h100", "h20", "b200") else "flash2"


def fused_shares(scores: Scores, like: str) -> Shares:
    """The shares of the peak that a fused kernel reaches on a device that is like `like`."""
    known = SHARES.get(like, _AMPERE)[scores.kernel or fastest(like)]
    exponential = EXPONENTIAL.get(like, EXPONENTIAL["a100"])
    tokens = 1 + (RAMP_CAUSAL if scores.is_causal else RAMP) / scores.tokens
    forward = _head_share(scores.head, exponential)
    backward = _head_share(scores.head, exponential / FUSED_BACKWARD)
    return Shares(known.forward * forward / tokens, known.backward * backward / tokens)


def unaligned(head: float) -> float:
    """How many times as long a product takes for a head whose rows do not start at multiples of 16 bytes."""
    return UNALIGNED if head % ALIGNED else 1.0


def _head_share(head: float, exponential: float) -> float:
    """The rate for heads of this width, relative to that for USUAL_HEAD."""
    filled = math.ceil(head / HEAD_STEP) * HEAD_STEP
    return head / (filled + exponential) * (USUAL_HEAD + exponential) / USUAL_HEAD
