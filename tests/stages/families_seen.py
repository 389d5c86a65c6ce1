"""Families of images and sounds that the code was not written with in mind."""

from __future__ import annotations

from tests.stages import family_batches as batches
from tests.stages.families_known import DENSE, ENCODER, GROUPED, SIGHT
from tests.stages.family import Family, Sizes

WAVE: Sizes = {**ENCODER, "conv_dim": [16, 16], "conv_stride": [4, 2], "conv_kernel": [8, 3]}
WAVE |= {"num_feat_extract_layers": 2, "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2}
WAVE |= {"hidden_dropout": 0.0, "layerdrop": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0}
WAVE |= {"feat_proj_dropout": 0.0, "final_dropout": 0.0, "apply_spec_augment": False, "pad_token_id": 0}
WAVE |= {"num_labels": 3, "classifier_proj_size": 16, "ctc_loss_reduction": "mean"}
MASKED: Sizes = {**WAVE, "apply_spec_augment": True, "mask_time_prob": 0.3, "mask_time_length": 2}
CONV: Sizes = {"hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 2, 1], "num_labels": 5, "drop_path_rate": 0.0}
RESNET: Sizes = {"embedding_size": 8, "hidden_sizes": [8, 16, 16, 16], "depths": [1, 1, 2, 1], "num_labels": 5}
EYES: Sizes = {**DENSE, "image_size": 16, "patch_size": 4, "projection_dim": 16}
TOWERS: Sizes = {
    "text_config": {**DENSE, "max_position_embeddings": 16, "eos_token_id": 2, "projection_dim": 16},
    "vision_config": EYES,
}
SEGMENTS: Sizes = {"num_encoder_blocks": 2, "depths": [2, 2], "sr_ratios": [2, 1], "hidden_sizes": [8, 16]}
SEGMENTS |= {"patch_sizes": [3, 3], "strides": [2, 2], "num_attention_heads": [1, 2], "mlp_ratios": [2, 2]}
SEGMENTS |= {"decoder_hidden_size": 16, "num_labels": 5, "drop_path_rate": 0.0, "classifier_dropout_prob": 0.0}
SEGMENTS |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
PAINTER: Sizes = {**SIGHT, "decoder_hidden_size": 16, "decoder_num_hidden_layers": 2, "decoder_num_attention_heads": 2}
MOBILE: Sizes = {"image_size": 32, "hidden_sizes": [16, 16, 16], "neck_hidden_sizes": [8, 8, 8, 16, 16, 16, 16]}
MOBILE |= {"num_attention_heads": 2, "num_labels": 5, "hidden_dropout_prob": 0.0, "classifier_dropout_prob": 0.0}
SPECTRA: Sizes = {
    **ENCODER,
    "max_length": 32,
    "num_mel_bins": 8,
    "patch_size": 4,
    "time_stride": 4,
    "frequency_stride": 4,
}
SERIES: Sizes = {
    "num_input_channels": 2,
    "context_length": 16,
    "patch_length": 4,
    "patch_stride": 4,
    "num_hidden_layers": 3,
}
SERIES |= {"d_model": 16, "num_attention_heads": 2, "ffn_dim": 24, "prediction_length": 4, "attention_dropout": 0.0}
SERIES |= {"ff_dropout": 0.0, "head_dropout": 0.0, "use_cls_token": False, "norm_type": "layernorm", "loss": "mse"}
LLAVA: Sizes = {
    "vision_config": {**EYES, "model_type": "clip_vision_model"},
    "text_config": {**GROUPED, "model_type": "llama"},
    "image_token_index": 2,
}
QWEN_VL: Sizes = {
    "vision_config": {
        "depth": 3,
        "embed_dim": 32,
        "hidden_size": 32,
        "num_heads": 4,
        "mlp_ratio": 2,
        "patch_size": 4,
        "spatial_merge_size": 2,
        "temporal_patch_size": 1,
    },
    "text_config": {**GROUPED, "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2]}},
    "image_token_id": 2,
    "video_token_id": 60,
    "vision_start_token_id": 61,
    "vision_end_token_id": 62,
}
DETECTOR: Sizes = {"d_model": 32, "encoder_layers": 3, "decoder_layers": 3, "encoder_attention_heads": 4}
DETECTOR |= {"decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "num_queries": 6}
DETECTOR |= {"dropout": 0.0, "num_labels": 5, "auxiliary_loss": False, "backbone": None, "use_timm_backbone": False}
DETECTOR["backbone_config"] = {**RESNET, "model_type": "resnet", "out_features": ["stage4"]}

SEEN: dict[str, Family] = {
    "clip": Family("CLIPModel", "CLIPConfig", {**TOWERS, "projection_dim": 16}, batches.matched, is_together=True),
    "siglip": Family("SiglipModel", "SiglipConfig", TOWERS, batches.matched, is_together=True),
    "llava": Family(
        "LlavaForConditionalGeneration",
        "LlavaConfig",
        {**LLAVA, "vision_feature_layer": -1},
        batches.seen,
        is_shifted=True,
    ),
    "llava-inner": Family(
        "LlavaForConditionalGeneration",
        "LlavaConfig",
        {**LLAVA, "vision_feature_layer": -2},
        batches.seen,
        is_shifted=True,
    ),
    "qwen2-vl": Family(
        "Qwen2VLForConditionalGeneration",
        "Qwen2VLConfig",
        QWEN_VL,
        batches.seen_in_patches,
        is_shifted=True,
        is_together=True,
        is_alone=True,
    ),
    "dinov2": Family("Dinov2ForImageClassification", "Dinov2Config", {**SIGHT, "mlp_ratio": 2}, batches.image),
    "dinov3": Family("DINOv3ViTModel", "DINOv3ViTConfig", SIGHT, lambda: batches.picture(32)),
    "deit": Family("DeiTForImageClassification", "DeiTConfig", SIGHT, batches.image),
    "vit-mae": Family(
        "ViTMAEForPreTraining", "ViTMAEConfig", {**PAINTER, "decoder_intermediate_size": 24}, batches.noisy
    ),
    "convnext": Family("ConvNextForImageClassification", "ConvNextConfig", {**CONV, "patch_size": 2}, batches.large),
    "convnext-v2": Family(
        "ConvNextV2ForImageClassification", "ConvNextV2Config", {**CONV, "patch_size": 2}, batches.large
    ),
    "resnet": Family("ResNetForImageClassification", "ResNetConfig", RESNET, batches.large, is_together=True),
    "segformer": Family("SegformerForSemanticSegmentation", "SegformerConfig", SEGMENTS, batches.segmented),
    "mobilevit": Family("MobileViTForImageClassification", "MobileViTConfig", MOBILE, batches.large, is_together=True),
    "videomae": Family("VideoMAEForVideoClassification", "VideoMAEConfig", {**SIGHT, "num_frames": 4}, batches.video),
    "detr": Family("DetrForObjectDetection", "DetrConfig", DETECTOR, lambda: batches.picture(32)),
    "wav2vec2": Family("Wav2Vec2ForSequenceClassification", "Wav2Vec2Config", WAVE, batches.wave),
    "wav2vec2-ctc": Family("Wav2Vec2ForCTC", "Wav2Vec2Config", WAVE, batches.spoken),
    "wav2vec2-masked": Family(
        "Wav2Vec2ForCTC", "Wav2Vec2Config", MASKED, batches.spoken, is_together=True, is_alone=True
    ),
    "hubert": Family("HubertForCTC", "HubertConfig", WAVE, batches.spoken),
    "wavlm": Family("WavLMForSequenceClassification", "WavLMConfig", WAVE, batches.wave),
    "ast": Family("ASTForAudioClassification", "ASTConfig", {**SPECTRA, "num_labels": 3}, batches.spectrum),
    "patchtst": Family("PatchTSTForPrediction", "PatchTSTConfig", SERIES, batches.series),
}
