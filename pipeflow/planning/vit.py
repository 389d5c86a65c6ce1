"""ViT: the sizes of a vision transformer, and what precedes and follows its layers (arXiv 2010.11929). Must not
contain: bytes, times and layouts; `blocks.py` has the layers.

Before the blocks there are a linear that makes a token of each patch of the image, a class token, and a position table.
After the blocks there are a last norm and a head, a linear that reads the class token. A tensor split leaves all of
these whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from types import MappingProxyType

from pipeflow.core.errors import UsageError, unknown
from pipeflow.core.placement import require_positive
from pipeflow.planning.block_sizes import near_divisors
from pipeflow.planning.blocks import Transformer


@dataclass(frozen=True, slots=True)
class ViT(Transformer):
    """The sizes of a vision transformer.

    Attributes:
        layers: number of layers.
        hidden: width of the hidden state.
        heads: attention heads per layer.
        kv_heads, head_size, ffn, gated: attention and MLP as in `GPT`; by default plain, with an MLP of 4 x `hidden`.
        experts, experts_per_token, shared_experts, biases, norm, head_norms: as in `GPT`.
        kv_rank, q_rank, rope_size, value_size, window, full_every, parallel_block: likewise.
        dense_layers, dense_ffn, expert_groups, groups_per_token: likewise.
        dropout: whether there is dropout, whose masks are kept in training.
        image: height and width of an image with three channels, in pixels.
        patch: height and width of a patch.
        classes: number of classes of the head.

    >>> ViT.named("vit-b16").parameters
    86567656

    Raises UsageError as `Transformer`, for sizes below 1, and for a patch that does not divide the image.
    """

    image: int = 224
    patch: int = 16
    classes: int = 1000
    _: KW_ONLY
    dropout: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        Transformer.__post_init__(self)
        require_positive(image=self.image, patch=self.patch, classes=self.classes)
        if self.image % self.patch:
            near = near_divisors(self.image, self.patch)
            raise UsageError(f"an image of {self.image} does not divide into patches of {self.patch}: {near}")

    @classmethod
    def named(cls, name: str) -> ViT:
        """The model `name` of VIT_PRESETS. Raises UsageError for an unknown name, with the nearest known one."""
        if name not in VIT_PRESETS:
            raise unknown("model", name, VIT_PRESETS)
        return VIT_PRESETS[name]

    @property
    def tokens(self) -> int:
        """Tokens per image: one for each patch, and the class token."""
        return (self.image // self.patch) ** 2 + 1

    @property
    def embedding_flops(self) -> float:
        """Operations per token in the forward of the linear that reads the patches."""
        return 2 * self._patch_weights * (self.tokens - 1) / self.tokens

    @property
    def head_flops(self) -> float:
        """Operations per token in the forward of the head, which reads only the class token."""
        return 2 * self.hidden * self.classes / self.tokens

    def head_outputs(self, tensor: int = 1) -> float:
        """Logits per token: the logits of an image divided by its number of tokens."""
        return self.classes / self.tokens

    def require_sequence(self, sequence: int) -> None:
        """Raises UsageError unless `sequence` is the number of tokens of an image."""
        if sequence != self.tokens:
            raise UsageError(
                f"a sequence of {sequence} tokens is no image of {self.image} in patches of {self.patch}, "
                f"which has {self.tokens}: change image or patch instead"
            )

    @property
    def _patch_weights(self) -> int:
        return 3 * self.patch**2 * self.hidden

    def _ends(self, tensor: int, *, first: bool, last: bool) -> int:
        before = self._patch_weights + self.hidden + self.hidden + self.tokens * self.hidden
        after = self.norm_parameters + (self.hidden + 1) * self.classes
        return first * before + last * after


_BASE, _LARGE, _HUGE = (12, 768, 12), (24, 1024, 16), (32, 1280, 16)

VIT_PRESETS: Mapping[str, ViT] = MappingProxyType(
    {
        "vit-b16": ViT(*_BASE),
        "vit-b32": ViT(*_BASE, patch=32),
        "vit-l16": ViT(*_LARGE),
        "vit-l32": ViT(*_LARGE, patch=32),
        "vit-h14": ViT(*_HUGE, patch=14),
    }
)
"""Models by name, for images of 224 x 224 and the 1000 classes of ImageNet."""
