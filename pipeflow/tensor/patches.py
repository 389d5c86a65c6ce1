"""PatchEmbedding: the first layer of a vision transformer, whole on every rank."""

from __future__ import annotations

from typing import Any, Self

import torch
from torch import Tensor, nn

from pipeflow.core.errors import UsageError
from pipeflow.parallel.transport.group import Group
from pipeflow.tensor.layer import TensorLayer


class PatchEmbedding(TensorLayer):
    """Turns images (batch, channels, height, width) into tokens (batch, 1 + patches, embed_dim): a class token and a
    linear map of each patch, plus positions. Every rank holds and computes all of it. Source: arXiv 2010.11929, section
    3.1.

    Args:
        image_size, patch_size: sides of the square images and patches in pixels; patch_size must divide image_size.
        in_channels: number of channels of an image.
        embed_dim: size of a token.
        dtype, device: of the parameters, as in torch.
        group: the tensor ranks; by default the tensor group of the context, or a group of one without a launch.

    Raises UsageError if patch_size does not divide image_size, and for images of another size.
    """

    def __init__(
        self,
        image_size: int,
        patch_size: int,
        in_channels: int,
        embed_dim: int,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        group: Group | None = None,
    ) -> None:
        super().__init__()
        self.join(group)
        if image_size % patch_size:
            fitting = max(1, image_size // patch_size) * patch_size
            raise UsageError(
                f"{self._get_name()}: patch_size={patch_size} does not divide image_size={image_size}: resize the "
                f"images to {fitting}, or choose a patch size that divides {image_size}"
            )
        self.image_size = image_size
        options: dict[str, Any] = {"dtype": dtype, "device": device}
        self.projection = nn.Conv2d(in_channels, embed_dim, patch_size, stride=patch_size, **options)
        self.class_token = nn.Parameter(torch.empty(1, 1, embed_dim, **options))
        self.positions = nn.Parameter(torch.empty(1, 1 + (image_size // patch_size) ** 2, embed_dim, **options))
        self._reset_tokens()

    def reset_parameters(self) -> None:
        """Draws the convolution as nn.Conv2d does, and the positions from a normal distribution with standard deviation
        0.02. The class token is zero.
        """
        self.projection.reset_parameters()
        self._reset_tokens()

    def _reset_tokens(self) -> None:
        nn.init.zeros_(self.class_token)
        nn.init.normal_(self.positions, std=0.02)

    def forward(self, images: Tensor) -> Tensor:
        if tuple(images.shape[-2:]) != (self.image_size, self.image_size):
            size = self.image_size
            raise UsageError(
                f"{self._get_name()} takes images of {size} x {size}, got a shape of {tuple(images.shape)}"
            )
        patches = self.projection(images).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.class_token.expand(len(images), -1, -1).to(patches.dtype), patches], dim=1)
        return tokens + self.positions

    @classmethod
    def from_native_module(cls, module: nn.Conv2d, group: Group | None = None, *, image_size: int) -> Self:
        """A layer with the convolution of `module`, which is not changed and whose patches must not overlap, and new
        positions. Load trained tokens into `class_token` and `positions`. Raises UsageError for another convolution.
        """
        if not isinstance(module, nn.Conv2d) or module.kernel_size != module.stride or module.groups != 1:
            raise UsageError(
                f"{cls.__name__} is made from an nn.Conv2d whose stride equals its kernel size, got {module}"
            )
        if module.kernel_size[0] != module.kernel_size[1] or module.bias is None or module.padding not in (0, (0, 0)):
            raise UsageError(f"{cls.__name__} is made from a square nn.Conv2d with bias and no padding, got {module}")
        weight, bias = module.weight, module.bias
        options: dict[str, Any] = {"dtype": weight.dtype, "device": weight.device, "group": group}
        layer = cls(image_size, module.kernel_size[0], module.in_channels, module.out_channels, **options)
        layer.projection.load_state_dict({"weight": weight, "bias": bias})
        layer.projection.weight.requires_grad_(weight.requires_grad)
        layer.projection.bias.requires_grad_(bias.requires_grad)  # type: ignore[union-attr]  # made with one
        return layer.train(module.training)
