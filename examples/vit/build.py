"""Pipeline stages of a vision transformer, and models of known sizes.

A rank makes only its own stages, first on torch's meta device, then on its own device with initial weights. Must not
contain: the model itself, or how it is trained.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import pipeflow
from vit.initial import initialize
from vit.keywords import from_timm
from vit.model import PipelineVisionTransformer


def build_stage(
    *, seed: int = 0, device: torch.device | str | None = None, init_method: str = "torch", **options: Any
) -> PipelineVisionTransformer:
    """Makes a stage, by default the whole model. Initial weights depend only on `seed` and on their names in the whole
    model. `options` are PipelineVisionTransformer's; `device` is as in `build_pipeline_vit`.
    """
    with torch.device("meta"):
        stage = PipelineVisionTransformer(init_method=init_method, **options)
    if device is None:
        context = pipeflow.context_if_launched()
        device = "cpu" if context is None else context.device
    if torch.device(device).type != "meta":
        stage.to_empty(device=device)
        initialize(stage, init_method, seed=seed)
    return stage


def build_pipeline_vit(
    num_layers: int,
    num_chunks: int = 1,
    device: torch.device | str | None = None,
    *,
    placement: pipeflow.Placement | None = None,
    **options: Any,
) -> nn.Module:
    """Makes this rank's stages of a vision transformer. Returns a module, or an nn.ModuleList in chunk order if there
    are several.

    Args:
        num_layers: number of blocks of the whole model.
        num_chunks: number of stages per rank.
        device: device of the weights; by default the rank's own, without a launch the CPU. On "meta" weights have no
            memory.
        placement: the schedule's placement; by default stage s is on rank s modulo the number of ranks. Without a
            launch there is one rank.
        options: arguments of PipelineVisionTransformer, and the `seed` of the weights.

    Raises UsageError if there are fewer layers than stages, for a `depth` other than num_layers, and as the model does.
    """
    if options.setdefault("depth", num_layers) != num_layers:
        raise pipeflow.UsageError(f"depth={options['depth']} differs from num_layers={num_layers}: remove depth")
    context = pipeflow.context_if_launched()
    size, rank = (1, 0) if context is None else (context.pipeline_size, context.pipeline_rank)
    if placement is None:
        placement = pipeflow.Placement.looped(size, num_chunks)
    parts = [part for [part] in pipeflow.partition_uniform(num_layers, placement.num_stages)]
    stages = [
        build_stage(
            first_stage=start == 0,
            last_stage=end == num_layers,
            start_idx=start,
            end_idx=end,
            device=device,
            **options,
        )
        for start, end in (parts[stage] for stage in placement.stages_of(rank))
    ]
    return stages[0] if len(stages) == 1 else nn.ModuleList(stages)


@dataclass(frozen=True)
class Preset:
    """A vision transformer of a known size; calling it builds this rank's stages."""

    dim: int
    depth: int
    num_heads: int
    patch_size: int
    img_size: int
    mlp_ratio: float = 4
    num_classes: int = 1000

    def __call__(
        self,
        pretrained: bool = False,
        num_chunks: int = 1,
        device: torch.device | str | None = None,
        placement: pipeflow.Placement | None = None,
        **options: Any,
    ) -> nn.Module:
        """Calls `build_pipeline_vit`; `options` are its own, or timm's (see `vit.keywords`). By default there is no
        dropout.

        Raises UsageError for pretrained=True, for an unsupported keyword, and as build_pipeline_vit does.
        """
        if pretrained:
            raise pipeflow.UsageError(
                "there are no trained weights here: remove pretrained, and load weights with load_safetensors"
            )
        options = {**vars(self), **from_timm(options)}
        return build_pipeline_vit(options["depth"], num_chunks, device, placement=placement, **options)


_SIZES = {  # dim, depth, heads
    "tiny": (192, 12, 3),
    "small": (384, 12, 6),
    "base": (768, 12, 12),
    "large": (1024, 24, 16),
}

PRESETS = {
    f"vit_{name}_patch{patch_size}_{img_size}": Preset(*size, patch_size, img_size)
    for name, size in _SIZES.items()
    for patch_size in (16, 32)
    for img_size in (224, 384)
} | {  # for images as small as those of CIFAR-10
    "vit_lite_depth7_patch4_32": Preset(256, 7, 4, 4, 32, mlp_ratio=2, num_classes=10),
    "vit_tiny_patch4_32": Preset(512, 6, 8, 4, 32, mlp_ratio=1, num_classes=10),
}
vit_base_patch16_224 = PRESETS["vit_base_patch16_224"]
