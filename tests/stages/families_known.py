"""The families that pipeflow promises to train: language models, encoders, vision and sound, with every head."""

from __future__ import annotations

from typing import Any

import torch

from tests.stages import family_batches as batches
from tests.stages.family import WORDS, Family

Sizes = dict[str, Any]

SIZES: Sizes = {"vocab_size": WORDS, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4}
DENSE = {**SIZES, "intermediate_size": 48}
GROUPED = {**DENSE, "num_key_value_heads": 2, "use_cache": False}
STILL = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
ENCODER = {**DENSE, **STILL}
ROUTED = {"num_experts_per_tok": 2, "output_router_logits": True, "router_aux_loss_coef": 0.5}
MIXTRAL = {**GROUPED, **ROUTED, "num_local_experts": 4}
QWEN_MOE = {**GROUPED, **ROUTED, "num_experts": 4, "moe_intermediate_size": 16, "head_dim": 8}
GPT: Sizes = {"vocab_size": WORDS, "n_embd": 32, "n_layer": 4, "n_head": 4, "use_cache": False}
GPT |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
NEO: Sizes = {"vocab_size": WORDS, "hidden_size": 32, "num_layers": 4, "num_heads": 4, "use_cache": False}
NEO |= {"attention_types": [[["global", "local"], 2]], "window_size": 4, "resid_dropout": 0.0, "embed_dropout": 0.0}
NEO |= {"attention_dropout": 0.0, "max_position_embeddings": 32}
OPT: Sizes = {**SIZES, "ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0.0, "use_cache": False}
BLOOM: Sizes = {"vocab_size": WORDS, "hidden_size": 32, "n_layer": 4, "n_head": 4, "use_cache": False}
TALL: Sizes = {"encoder_layers": 3, "decoder_layers": 3, "encoder_attention_heads": 4, "decoder_attention_heads": 4}
TALL |= {"encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "d_model": 32, "vocab_size": WORDS, "dropout": 0.0}
SIGHT = {**ENCODER, "image_size": 16, "patch_size": 4, "num_labels": 5}
del SIGHT["vocab_size"]
BEIT = {**SIGHT, "drop_path_rate": 0.0, "use_relative_position_bias": True}
WINDOWS: Sizes = {"image_size": 16, "patch_size": 2, "embed_dim": 8, "depths": [2, 2], "num_heads": [2, 4]}
WINDOWS |= {"window_size": 4, "num_labels": 5, "drop_path_rate": 0.0}
T5: Sizes = {"vocab_size": WORDS, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 3, "num_heads": 4}
T5 |= {"decoder_start_token_id": 0, "use_cache": False, "dropout_rate": 0.0}
WHISPER = {**TALL, "num_mel_bins": 8, "max_source_positions": 16, "max_target_positions": 16, "pad_token_id": 0}
WHISPER |= {"bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1, "use_cache": False}
POSITIONS = {**ENCODER, "max_position_embeddings": 32}
LABELLED: Sizes = {"num_labels": 3, "pad_token_id": 0, "classifier_dropout": 0.0}
SAM: Sizes = {
    "vision_config": {
        "hidden_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "image_size": 16,
        "patch_size": 4,
        "output_channels": 16,
        "mlp_dim": 48,
        "window_size": 2,
        "global_attn_indexes": [1],
        "num_pos_feats": 8,
    },
    "prompt_encoder_config": {"hidden_size": 16, "image_size": 16, "patch_size": 4, "mask_input_channels": 4},
    "mask_decoder_config": {"hidden_size": 16, "mlp_dim": 32, "num_attention_heads": 2, "iou_head_hidden_dim": 16},
}
BLIP2: Sizes = {
    "vision_config": {**DENSE, "image_size": 16, "patch_size": 4, "attention_dropout": 0.0},
    "qformer_config": {**ENCODER, "encoder_hidden_size": 32, "cross_attention_frequency": 2},
    "text_config": {**OPT, "model_type": "opt"},
    "num_query_tokens": 4,
    "image_token_index": 2,
}


def see_and_say() -> dict[str, Any]:
    """Images, and sentences that begin with a place for each of 4 tokens of the image."""
    numbers = torch.cat([torch.full((3, 4), 2), batches.words()], 1)
    return {"pixel_values": batches.pixels(), "input_ids": numbers, "labels": numbers.masked_fill(numbers == 2, -100)}


KNOWN: dict[str, Family] = {
    "llama": Family("LlamaForCausalLM", "LlamaConfig", GROUPED, batches.text),
    "llama-tied": Family("LlamaForCausalLM", "LlamaConfig", {**GROUPED, "tie_word_embeddings": True}, batches.text),
    "mistral": Family("MistralForCausalLM", "MistralConfig", GROUPED, batches.text),
    "qwen2": Family("Qwen2ForCausalLM", "Qwen2Config", GROUPED, batches.text),
    "qwen3": Family("Qwen3ForCausalLM", "Qwen3Config", {**GROUPED, "head_dim": 8}, batches.text),
    "glm": Family("GlmForCausalLM", "GlmConfig", {**GROUPED, "head_dim": 8, "pad_token_id": 0}, batches.text),
    "glm4": Family("Glm4ForCausalLM", "Glm4Config", {**GROUPED, "head_dim": 8, "pad_token_id": 0}, batches.text),
    "gpt2": Family("GPT2LMHeadModel", "GPT2Config", GPT, batches.text),
    "gpt-neo": Family("GPTNeoForCausalLM", "GPTNeoConfig", NEO, batches.text),
    "gptj": Family("GPTJForCausalLM", "GPTJConfig", {**GPT, "rotary_dim": 4}, batches.text),
    "opt": Family("OPTForCausalLM", "OPTConfig", OPT, batches.text),
    "bloom": Family("BloomForCausalLM", "BloomConfig", BLOOM, batches.text),
    "bert": Family("BertForMaskedLM", "BertConfig", ENCODER, batches.text),
    "roberta": Family("RobertaForMaskedLM", "RobertaConfig", POSITIONS, batches.text),
    "albert": Family("AlbertForMaskedLM", "AlbertConfig", {**ENCODER, "embedding_size": 16}, batches.text),
    "ernie": Family("ErnieForMaskedLM", "ErnieConfig", ENCODER, batches.text),
    "t5": Family("T5ForConditionalGeneration", "T5Config", T5, batches.pair),
    "vit": Family("ViTForImageClassification", "ViTConfig", SIGHT, batches.image),
    "beit": Family("BeitForImageClassification", "BeitConfig", BEIT, batches.image),
    "swin": Family("SwinForImageClassification", "SwinConfig", WINDOWS, batches.image),
    "swinv2": Family("Swinv2ForImageClassification", "Swinv2Config", WINDOWS, batches.image),
    "whisper": Family("WhisperForConditionalGeneration", "WhisperConfig", WHISPER, batches.sound),
    "mixtral": Family("MixtralForCausalLM", "MixtralConfig", MIXTRAL, batches.text),
    "qwen3-moe": Family("Qwen3MoeForCausalLM", "Qwen3MoeConfig", QWEN_MOE, batches.text),
    "blip-2": Family("Blip2ForConditionalGeneration", "Blip2Config", BLIP2, see_and_say, is_shifted=True),
}

_BERT: Sizes = {**ENCODER, **LABELLED}
HEADS: dict[str, Family] = {
    "sam": Family("SamModel", "SamConfig", SAM, batches.picture),
    "llama-base": Family("LlamaModel", "LlamaConfig", GROUPED, batches.unlabelled),
    "llama-classifier": Family(
        "LlamaForSequenceClassification", "LlamaConfig", {**GROUPED, **LABELLED}, batches.classified
    ),
    "llama-tagger": Family("LlamaForTokenClassification", "LlamaConfig", {**GROUPED, **LABELLED}, batches.tagged),
    "llama-answers": Family("LlamaForQuestionAnswering", "LlamaConfig", GROUPED, batches.answered),
    "gpt2-classifier": Family("GPT2ForSequenceClassification", "GPT2Config", {**GPT, **LABELLED}, batches.classified),
    "gpt2-tagger": Family("GPT2ForTokenClassification", "GPT2Config", {**GPT, **LABELLED}, batches.tagged),
    "gpt2-answers": Family("GPT2ForQuestionAnswering", "GPT2Config", GPT, batches.answered),
    "bert-base": Family("BertModel", "BertConfig", ENCODER, batches.unlabelled),
    "bert-classifier": Family("BertForSequenceClassification", "BertConfig", _BERT, batches.classified),
    "bert-tagger": Family("BertForTokenClassification", "BertConfig", _BERT, batches.tagged),
    "bert-answers": Family("BertForQuestionAnswering", "BertConfig", ENCODER, batches.answered),
    "bert-choice": Family("BertForMultipleChoice", "BertConfig", ENCODER, batches.chosen),
    "bert-pretraining": Family("BertForPreTraining", "BertConfig", ENCODER, batches.pretraining, is_whole=True),
    "bert-next-sentence": Family(
        "BertForNextSentencePrediction",
        "BertConfig",
        ENCODER,
        lambda: {**batches.text(), "labels": batches.chosen()["labels"]},
    ),
    "albert-choice": Family(
        "AlbertForMultipleChoice",
        "AlbertConfig",
        {**ENCODER, "embedding_size": 16, "classifier_dropout_prob": 0.0},
        batches.chosen,
    ),
    "roberta-classifier": Family(
        "RobertaForSequenceClassification", "RobertaConfig", {**POSITIONS, **LABELLED}, batches.classified
    ),
    "opt-classifier": Family("OPTForSequenceClassification", "OPTConfig", {**OPT, **LABELLED}, batches.classified),
    "bloom-tagger": Family("BloomForTokenClassification", "BloomConfig", {**BLOOM, **LABELLED}, batches.tagged),
    "t5-encoder": Family("T5EncoderModel", "T5Config", T5, batches.unlabelled),
    "t5-classifier": Family("T5ForSequenceClassification", "T5Config", {**T5, "num_labels": 3}, batches.ended),
    "t5-tagger": Family("T5ForTokenClassification", "T5Config", {**T5, "num_labels": 3}, batches.tagged),
    "t5-answers": Family("T5ForQuestionAnswering", "T5Config", T5, batches.answered),
    "vit-base": Family("ViTModel", "ViTConfig", SIGHT, batches.picture),
    "vit-painter": Family(
        "ViTForMaskedImageModeling",
        "ViTConfig",
        {**SIGHT, "encoder_stride": 4},
        batches.masked_image,
        is_whole=True,
    ),
    "beit-painter": Family(
        "BeitForMaskedImageModeling",
        "BeitConfig",
        {**BEIT, "vocab_size": WORDS, "use_mask_token": True},
        batches.masked_image,
    ),
    "swin-painter": Family(
        "SwinForMaskedImageModeling",
        "SwinConfig",
        {**WINDOWS, "encoder_stride": 4},
        lambda: batches.masked_image(64),
        is_whole=True,
    ),
    "whisper-classifier": Family(
        "WhisperForAudioClassification", "WhisperConfig", {**WHISPER, "num_labels": 3}, batches.sound_class
    ),
    "whisper-spec-augment": Family(
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        {
            **WHISPER,
            "apply_spec_augment": True,
            "mask_time_length": 2,
            "mask_time_prob": 0.2,
            "mask_feature_prob": 0.2,
            "mask_feature_length": 2,
        },
        batches.sound,
        is_alone=True,
    ),
    "mixtral-classifier": Family(
        "MixtralForSequenceClassification",
        "MixtralConfig",
        {**GROUPED, **LABELLED, "num_local_experts": 4},
        batches.classified,
    ),
}
