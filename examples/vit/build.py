"""A vision transformer over a pipeline: which rank holds what; and models of known sizes.

A rank makes its own stages alone, first without memory (torch's meta device), then on its device with their first
weights. What is not here: the model itself, and how it is trained.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import pipeflow
from pipeflow.parallel.context import context_if_launched
from vit.initial import initialize
from vit.keywords import from_timm
from vit.model import PipelineVisionTransformer


def build_stage(
    *, seed: int = 0, device: torch.device | str | None = None, init_method: str = "torch", **options: Any
) -> PipelineVisionTransformer:
    """A stage with its first weights, each drawn from `seed` and from its name in the whole model alone. `options` are
    PipelineVisionTransformer's; unless they say otherwise, it is the whole model. `device` is as for
    `build_pipeline_vit`.
    """
    with torch.device("meta"):
        stage = PipelineVisionTransformer(init_method=init_method, **options)
    if device is None:
        context = context_if_launched()
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
    """This rank's stages of a vision transformer, in chunk order: a module, or an nn.ModuleList when there are several.

    Args:
        num_layers: of the whole model.
        num_chunks: stages a rank.
        device: where; the rank's own unless given, without a launch the CPU. On "meta" weights have shapes and no
            memory.
        placement: of the schedule; unless given, stages are dealt to the ranks in turn. Without a launch there is one
            rank.
        options: PipelineVisionTransformer's, and the `seed` of the weights.

    Raises UsageError when there are fewer layers than stages, for a `depth` that is not num_layers, and as the model
    does.
    """
    if options.setdefault("depth", num_layers) != num_layers:
        raise pipeflow.UsageError(f"depth={options['depth']} is not num_layers={num_layers}: leave depth out")
    context = context_if_launched()
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
    """A vision transformer of a known size, built over the pipeline when it is called."""

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
        """As `build_pipeline_vit`, whose own `options` these are, or timm's, as of `vit.keywords`; without dropout
        unless they ask for it.

        Raises UsageError for pretrained=True, for a keyword that cannot be honoured, and as build_pipeline_vit does.
        """
        if pretrained:
            raise pipeflow.UsageError(
                "there are no trained weights here: leave pretrained out, and load weights with load_safetensors"
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
