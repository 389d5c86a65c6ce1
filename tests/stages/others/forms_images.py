"""Forms that take images: of timm, torchvision, vit-pytorch, segmentation-models-pytorch, open_clip and MONAI."""

from __future__ import annotations

from typing import Any

from tests.stages.others.form import Form, image, normal, several, words


def _timm(name: str, size: int = 32, **sizes: Any) -> Form:
    return Form("timm", name, lambda timm: timm.create_model(name, num_classes=5, **sizes), image(size))


def _class(name: str, size: int = 32, **sizes: Any) -> Form:
    return Form("timm.models", name, lambda models: getattr(models, name)(num_classes=5, **sizes), image(size))


def _sized(name: str, size: int = 32, **sizes: Any) -> Form:
    """A model that is made for one size of images."""
    return _timm(name, size, img_size=size, **sizes)


_NARROW: dict[str, Any] = {"depth": 4, "embed_dim": 32, "num_heads": 4, "patch_size": 8}
_STAGES: dict[str, Any] = {"depths": (1, 1, 2, 1), "embed_dim": 16, "num_heads": (2, 2, 4, 4)}
_WIDTHS: dict[str, Any] = {"depths": (1, 1, 2, 1), "dims": (8, 16, 24, 32)}

TIMM = [
    _sized("vit_tiny_patch16_224", **_NARROW),
    _sized("vit_tiny_patch16_224", **_NARROW, class_token=False, global_pool="avg")._replace(
        name="vit, mean of tokens"
    ),
    _sized("vit_small_patch16_18x2_224", **_NARROW),
    _sized("vit_medium_patch16_rope_reg1_gap_256", **_NARROW),
    _sized("vit_base_patch16_clip_224", **_NARROW),
    _sized("deit_tiny_distilled_patch16_224", **_NARROW),
    _sized("deit3_small_patch16_224", **_NARROW),
    _sized("beit_base_patch16_224", **_NARROW),
    _sized("beitv2_base_patch16_224", **_NARROW),
    _sized("eva02_tiny_patch14_224", **_NARROW),
    _sized("cait_xxs24_224", **_NARROW),
    _sized("xcit_nano_12_p8_224", **_NARROW),
    _class(
        "VOLO",
        64,
        img_size=64,
        layers=(1, 1, 2, 1),
        embed_dims=(24, 32, 32, 32),
        num_heads=(2, 4, 4, 4),
        use_mix_token=False,
    ),
    _sized("convit_tiny", **_NARROW, local_up_to_layer=2),
    _class("TNT", img_size=32, depth=4, embed_dim=32, inner_dim=8, num_heads_inner=2, num_heads_outer=4),
    _sized("swin_tiny_patch4_window7_224", **{**_STAGES, "window_size": 4, "patch_size": 2}),
    _sized("swinv2_tiny_window8_256", **{**_STAGES, "window_size": 4, "patch_size": 2}),
    _sized("swinv2_cr_tiny_224", 64, depths=(1, 1, 2, 1), embed_dim=16, num_heads=(2, 2, 4, 4), patch_size=4),
    _class("MlpMixer", img_size=32, num_blocks=4, embed_dim=32, patch_size=8),
    _timm("test_nfnet", 32),
    _timm("test_byobnet", 32),
    _sized("sequencer2d_s", 56, layers=(1, 1, 2, 1), embed_dims=(16, 16, 16, 16), hidden_sizes=(4, 4, 4, 4)),
    _sized("twins_svt_small", 64, depths=(1, 1, 2, 1), embed_dims=(16, 16, 32, 32), num_heads=(2, 2, 4, 4)),
    _sized("twins_pcpvt_small", 64, depths=(1, 1, 2, 1), embed_dims=(16, 16, 32, 32), num_heads=(1, 2, 4, 4)),
    _sized("hiera_tiny_224", 64, embed_dim=16, stages=(1, 1, 2, 1)),
    _class("FocalNet", depths=(1, 1, 2, 1), embed_dim=16, drop_path_rate=0.0),
    _timm("davit_tiny", 64, depths=(1, 1, 2, 1), embed_dims=(16, 16, 32, 32), num_heads=(2, 2, 4, 4)),
    _class("PyramidVisionTransformerV2", 64, depths=(1, 1, 2, 1), embed_dims=(16, 16, 32, 32)),
    _timm("convnext_atto", 64, **_WIDTHS),
    _timm("convnextv2_atto", 64, **_WIDTHS),
    _timm("inception_next_atto", 64, **_WIDTHS),
    _timm("edgenext_xx_small", 64, depths=(1, 1, 2, 1), dims=(8, 16, 24, 32)),
    _timm("mambaout_femto", 64, depths=(1, 1, 2, 1), dims=(8, 16, 24, 32)),
    _class("MetaFormer", 64, depths=(1, 1, 2, 1), dims=(8, 16, 24, 32)),
    _timm("test_coatnet", 64, img_size=64),
    _timm("test_maxvit", 64, img_size=64),
    _timm("test_vit_relpos", 32, img_size=32),
    _timm("starnet_s1", 64, depths=(1, 1, 2, 1), base_dim=8),
    _timm(
        "rdnet_tiny",
        64,
        num_init_features=16,
        growth_rates=(8, 8, 8, 8),
        num_blocks_list=(1, 1, 1, 1),
        is_downsample_block=(None, True, True, True),
        transition_compression_ratio=0.5,
    ),
    _timm("test_efficientnet"),
    _timm("efficientvit_b0", 64),
    _timm("efficientvit_m0", 64, img_size=64),
    _timm("fastvit_t8", 64, layers=(1, 1, 1, 1), embed_dims=(16, 16, 32, 32)),
    _timm("repvit_m0_9", 32, embed_dim=(8, 16, 24, 32), depth=(1, 1, 1, 1)),
    _timm("mobilenetv3_small_050", 32),
    _timm("mobilenetv4_conv_small", 32),
    _timm("resnet18", 32, channels=(8, 16, 24, 32)),
    _timm("resnetv2_18", 32, channels=(32, 64, 96, 128)),
    _timm("seresnet18", 32, channels=(16, 16, 32, 32)),
    _timm("regnetx_002", 32),
    _class(
        "CrossVit", 32, img_size=32, patch_size=(8, 16), embed_dim=(16, 24), num_heads=(2, 4), depth=((1, 2, 0),) * 3
    ),
    _class("CoaT", 64, img_size=64, patch_size=4, embed_dims=(16, 16, 32, 32), serial_depths=(1, 1, 1, 1)),
    _class("Nest", 32, img_size=32, embed_dims=(16, 16, 32), num_heads=(2, 2, 4), depths=(1, 1, 2), drop_path_rate=0.0),
    _timm("tiny_vit_5m_224", 64, depths=(1, 1, 2, 1), embed_dims=(16, 16, 32, 32), num_heads=(2, 2, 4, 4)),
]

_VISION: dict[str, Any] = {"num_classes": 5}
TORCHVISION = [
    Form("torchvision", "resnet18", lambda it: it.models.resnet18(**_VISION), image()),
    Form("torchvision", "DenseNet", lambda it: it.models.DenseNet(8, (2, 2, 2, 2), 8, num_classes=5), image()),
    Form("torchvision", "squeezenet1_1", lambda it: it.models.squeezenet1_1(**_VISION), image(64)),
    Form("torchvision", "mobilenet_v2", lambda it: it.models.mobilenet_v2(**_VISION, width_mult=0.25), image()),
    Form("torchvision", "mobilenet_v3_small", lambda it: it.models.mobilenet_v3_small(**_VISION), image()),
    Form("torchvision", "shufflenet_v2_x0_5", lambda it: it.models.shufflenet_v2_x0_5(**_VISION), image()),
    Form("torchvision", "mnasnet0_5", lambda it: it.models.mnasnet0_5(**_VISION), image()),
    Form("torchvision", "googlenet", lambda it: it.models.googlenet(**_VISION, init_weights=False), image(64)),
    Form(
        "torchvision",
        "VisionTransformer",
        lambda it: it.models.VisionTransformer(32, 8, 4, 4, 32, 64, num_classes=5),
        image(),
    ),
    Form(
        "torchvision",
        "SwinTransformer",
        lambda it: it.models.SwinTransformer([2, 2], 16, [1, 1, 2, 1], [2, 2, 4, 4], [4, 4], 2.0, num_classes=5),
        image(32),
    ),
    Form(
        "torchvision",
        "maxvit_t",
        lambda it: it.models.MaxVit((64, 64), 8, 2, [16, 16], [1, 2], 8, 0.0, num_classes=5),
        image(64),
    ),
]


def _vit(name: str, module: str, size: int = 32, **sizes: Any) -> Form:
    library, full = (f"vit_pytorch.{module}", f"{module}.{name}") if module else ("vit_pytorch", name)
    return Form(library, full, lambda it: getattr(it, name)(**sizes), image(size))


_VIT: dict[str, Any] = {"image_size": 32, "patch_size": 8, "num_classes": 5, "dim": 32, "depth": 4, "heads": 4}
VIT_PYTORCH = [
    _vit("ViT", "", **_VIT, mlp_dim=64),
    _vit("SimpleViT", "", **_VIT, mlp_dim=64),
    _vit("DeepViT", "deepvit", **_VIT, mlp_dim=64),
    _vit("CaiT", "cait", **_VIT, mlp_dim=64, cls_depth=2),
    _vit(
        "CCT",
        "cct",
        img_size=32,
        embedding_dim=32,
        n_conv_layers=1,
        num_layers=4,
        num_heads=4,
        num_classes=5,
        mlp_ratio=2.0,
        kernel_size=3,
        stride=2,
        padding=1,
        pooling_kernel_size=3,
        pooling_stride=2,
        pooling_padding=1,
    ),
    _vit("PiT", "pit", image_size=32, patch_size=4, num_classes=5, dim=16, depth=(2, 2), heads=4, mlp_dim=32),
    _vit("LeViT", "levit", 64, image_size=64, num_classes=5, stages=2, dim=(16, 32), depth=2, heads=(2, 4), mlp_mult=2),
    _vit("CvT", "cvt", 64, num_classes=5, s1_emb_dim=8, s2_emb_dim=16, s3_emb_dim=24, s3_depth=2),
    _vit(
        "TwinsSVT",
        "twins_svt",
        64,
        num_classes=5,
        s1_emb_dim=8,
        s2_emb_dim=16,
        s3_emb_dim=24,
        s4_emb_dim=32,
        s1_local_patch_size=2,
        s2_local_patch_size=2,
        s3_local_patch_size=2,
        s4_local_patch_size=1,
        s1_global_k=2,
        s2_global_k=2,
        s3_global_k=2,
        s4_global_k=1,
        s3_depth=1,
    ),
    _vit(
        "CrossViT",
        "cross_vit",
        image_size=32,
        num_classes=5,
        sm_dim=16,
        lg_dim=24,
        sm_patch_size=8,
        lg_patch_size=16,
        depth=4,
    ),
    _vit("RegionViT", "regionvit", 64, dim=(8, 16, 16, 32), depth=(1, 1, 1, 1), window_size=2, num_classes=5),
    _vit("MaxViT", "max_vit", 64, num_classes=5, dim_conv_stem=8, dim=8, dim_head=8, depth=(1, 1), window_size=4),
    _vit(
        "NesT",
        "nest",
        image_size=32,
        patch_size=4,
        dim=16,
        heads=2,
        num_hierarchies=3,
        block_repeats=(1, 1, 2),
        num_classes=5,
    ),
    _vit("XCiT", "xcit", **_VIT, cls_depth=2, mlp_dim=64),
    _vit("ViT", "parallel_vit", **_VIT, mlp_dim=64),
    _vit("ViT", "vit_for_small_dataset", **_VIT, mlp_dim=64),
    _vit(
        "ViViT",
        "vivit",
        image_size=16,
        frames=4,
        image_patch_size=8,
        frame_patch_size=2,
        num_classes=5,
        dim=32,
        spatial_depth=2,
        temporal_depth=2,
        heads=4,
        mlp_dim=64,
        use_flash_attn=False,
    )._replace(inputs=normal(3, 4, 16, 16)),
    _vit("ViT", "vit_1d", seq_len=32, patch_size=4, num_classes=5, dim=32, depth=4, heads=4, mlp_dim=64)._replace(
        inputs=normal(3, 32)
    ),
    _vit(
        "T2TViT", "t2t", image_size=32, dim=32, depth=4, heads=4, mlp_dim=64, num_classes=5, t2t_layers=((7, 4), (3, 2))
    ),
    _vit("RvT", "rvt", image_size=32, patch_size=8, num_classes=5, dim=32, depth=4, heads=4, mlp_dim=64),
    _vit(
        "ScalableViT",
        "scalable_vit",
        64,
        num_classes=5,
        dim=8,
        heads=(2, 2, 2, 2),
        depth=(1, 1, 1, 1),
        ssa_dim_key=(8, 8, 8, 8),
        reduction_factor=(4, 2, 1, 1),
        window_size=(4, 4, None, None),
    ),
]

_SMP: dict[str, Any] = {"encoder_name": "tu-test_resnet", "encoder_weights": None, "classes": 3}


def _segmentation(name: str, size: int) -> Form:
    return Form("segmentation_models_pytorch", name, lambda it: getattr(it, name)(**_SMP), image(size))


SEGMENTATION = [
    _segmentation(name, size)
    for name, size in [
        ("Unet", 32),
        ("UnetPlusPlus", 32),
        ("Linknet", 32),
        ("FPN", 32),
        ("DeepLabV3Plus", 64),
        ("MAnet", 32),
        ("UPerNet", 64),
        ("Segformer", 32),
    ]
]

_CLIP: dict[str, Any] = {
    "embed_dim": 16,
    "vision_cfg": {"image_size": 32, "layers": 4, "width": 32, "patch_size": 8, "head_width": 8},
    "text_cfg": {"context_length": 8, "vocab_size": 32, "width": 32, "heads": 4, "layers": 4},
}
OPEN_CLIP = [
    Form("open_clip", "CLIP", lambda it: it.CLIP(**_CLIP), several(image(), words(8))),
    Form(
        "open_clip",
        "CLIP with a ResNet",
        lambda it: it.CLIP(
            **{**_CLIP, "vision_cfg": {"image_size": 32, "layers": (1, 1, 1, 1), "width": 8, "head_width": 8}}
        ),
        several(image(), words(8)),
    ),
    Form("open_clip", "CustomTextCLIP", lambda it: it.CustomTextCLIP(**_CLIP), several(image(), words(8))),
    Form(
        "open_clip",
        "CoCa",
        lambda it: it.CoCa(
            embed_dim=32,
            vision_cfg={**_CLIP["vision_cfg"], "attentional_pool": True, "attn_pooler_heads": 4, "output_tokens": True},
            text_cfg={**_CLIP["text_cfg"], "embed_cls": True, "output_tokens": True},
            multimodal_cfg={**_CLIP["text_cfg"], "layers": 4},
        ),
        several(image(), words(8)),
    ),
]

MONAI = [
    Form(
        "monai.networks.nets", "UNETR", lambda it: it.UNETR(1, 2, (32, 32), 8, 32, 64, 4, spatial_dims=2), image(32, 1)
    ),
    Form(
        "monai.networks.nets", "SwinUNETR", lambda it: it.SwinUNETR(1, 2, feature_size=12, spatial_dims=2), image(64, 1)
    ),
    Form("monai.networks.nets", "SegResNet", lambda it: it.SegResNet(2, 8, 1, 2), image(32, 1)),
    Form("monai.networks.nets", "BasicUNet", lambda it: it.BasicUNet(2, 1, 2, (8, 8, 16, 16, 32, 8)), image(32, 1)),
    Form(
        "monai.networks.nets",
        "DynUNet",
        lambda it: it.DynUNet(2, 1, 2, [3] * 4, [1, 2, 2, 2], [2] * 3, filters=[8, 16, 24, 32]),
        image(32, 1),
    ),
]

IMAGES = [*TIMM, *TORCHVISION, *VIT_PYTORCH, *SEGMENTATION, *OPEN_CLIP, *MONAI]
