"""Setup: how the stages of a GPT are laid out over devices, and what of their work is kept. What must not live here:
what that costs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from pipeflow.core.placement import require_positive


@dataclass(frozen=True, slots=True)
class Precision:
    """The bytes that training keeps per parameter.

    Half precision takes 2 + 2 + 4 + 8 bytes (arXiv 1910.02054, section 3.1); gradients have the type of their weights,
    as in torch.

    Attributes:
        name: as `pipeflow plan --precision` takes it.
        weight: bytes of a weight, and of a number in an activation.
        gradient: bytes of its gradient.
        master: bytes of its float32 master weight, 0 without one.
        moments: bytes of Adam's two moments together.
    """

    name: str
    weight: int
    gradient: int
    master: int
    moments: int


PRECISIONS: Mapping[str, Precision] = MappingProxyType(
    {
        "float32": Precision("float32", weight=4, gradient=4, master=0, moments=8),
        "bf16": Precision("bf16", weight=2, gradient=2, master=4, moments=8),
        "fp16": Precision("fp16", weight=2, gradient=2, master=4, moments=8),
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """How the work of one pipeline rank is laid out over devices, and what of it is kept.

    Attributes:
        tensor: devices that share every layer of a stage.
        data: copies of the pipeline, each with its own part of the batch.
        microbatch_size: sequences per microbatch.
        sequence: tokens per sequence; the model's `positions` unless given.
        precision: of weights, gradients, optimizer and activations.
        zero: the `data` ranks share out master weights and moments among them (ZeRO-1, arXiv 1910.02054).
        checkpoint: a layer keeps its input alone, and is computed again in its backward.
        sequence_parallel: the tensor ranks share what each else had whole (arXiv 2205.05198, section 4.2.2).
        keep_scores: attention keeps its scores, as without torch's scaled_dot_product_attention or FlashAttention
            (arXiv 2205.14135).

    Raises UsageError for sizes below 1.
    """

    tensor: int = 1
    data: int = 1
    microbatch_size: int = 1
    sequence: int | None = None
    precision: Precision = PRECISIONS["bf16"]
    zero: bool = False
    checkpoint: bool = False
    sequence_parallel: bool = False
    keep_scores: bool = False

    def __post_init__(self) -> None:
        require_positive(tensor=self.tensor, data=self.data, microbatch_size=self.microbatch_size)
        if self.sequence is not None:
            require_positive(sequence=self.sequence)
