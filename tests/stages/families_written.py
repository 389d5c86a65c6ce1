"""Families of text that the code was not written with in mind."""

from __future__ import annotations

from typing import Any

from tests.stages import family_batches as batches
from tests.stages.families_known import DENSE, ENCODER, GPT, GROUPED, LABELLED, POSITIONS, SIZES, STILL, T5, TALL
from tests.stages.family import WORDS, Family, Sizes

HEAD8 = {**GROUPED, "head_dim": 8}
BIOGPT: Sizes = {**DENSE, **STILL, "activation_dropout": 0.0, "layerdrop": 0.0, "use_cache": False}
PADDED = {**GROUPED, "pad_token_id": 0}
FEW = {"num_experts_per_tok": 2, "output_router_logits": True}
EXPERTS = {**GROUPED, **FEW, "num_experts": 4}
LOCAL_EXPERTS = {**GROUPED, **FEW, "num_local_experts": 4}
SHARED = {**EXPERTS, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}
NEXT = {**SHARED, "head_dim": 8, "linear_num_value_heads": 4, "linear_num_key_heads": 2}
NEXT |= {"linear_key_head_dim": 8, "linear_value_head_dim": 8}
GEMMA3 = {**HEAD8, "layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 4}
PAIR = {**TALL, "use_cache": False, "pad_token_id": 1, "decoder_start_token_id": 2}
PAIR |= {"max_position_embeddings": 32, "attention_dropout": 0.0, "activation_dropout": 0.0}
LED = {**PAIR, "attention_window": 4, "max_encoder_position_embeddings": 32, "max_decoder_position_embeddings": 32}
LATENT = {**GROUPED, "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 4}
LATENT |= {"qk_nope_head_dim": 4, "v_head_dim": 8, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2}
LATENT |= {"topk_group": 1, "first_k_dense_replace": 1, "moe_intermediate_size": 16, "n_shared_experts": 1}
STATES = {**SIZES, "state_size": 4, "use_cache": False}
MAMBA2 = {**STATES, "num_heads": 8, "head_dim": 8, "n_groups": 2, "chunk_size": 4}
JAMBA = {**EXPERTS, "mamba_d_state": 4, "mamba_dt_rank": 4, "use_mamba_kernels": False, "attn_layer_offset": 1}
JAMBA |= {"attn_layer_period": 2, "expert_layer_offset": 1, "expert_layer_period": 2}
RWKV = {**SIZES, "attention_hidden_size": 32, "context_length": 16, "use_cache": False}
RELATIVE = {**POSITIONS, "relative_attention": True, "pos_att_type": ["p2c", "c2p"]}
DISTILLED = {"vocab_size": WORDS, "dim": 32, "n_layers": 4, "n_heads": 4, "hidden_dim": 48, "dropout": 0.0}
FALCON_GROUPS = {"use_cache": False, "new_decoder_architecture": True, "num_kv_heads": 2}
XLNET = {"vocab_size": WORDS, "d_model": 32, "n_layer": 4, "n_head": 4, "d_inner": 48, "dropout": 0.0}
FUNNEL = {"vocab_size": WORDS, "block_sizes": [2, 2], "d_model": 32, "n_head": 4, "d_head": 8, "d_inner": 48}
FUNNEL |= {"num_decoder_layers": 2, "hidden_dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0}
SPARSE = {**POSITIONS, "max_position_embeddings": 64, "block_size": 2, "num_random_blocks": 1}
SWITCH = {**T5, "num_experts": 4, "expert_capacity": 8, "num_decoder_layers": 3, "router_jitter_noise": 0.0}


def _causal(model: str, sizes: Sizes, **options: Any) -> Family:
    return Family(f"{model}ForCausalLM", f"{model}Config", sizes, batches.text, **options)


def _pairs(model: str, sizes: Sizes = PAIR, **options: Any) -> Family:
    return Family(f"{model}ForConditionalGeneration", f"{model}Config", sizes, batches.pair, **options)


def _masked(model: str, sizes: Sizes = POSITIONS, **options: Any) -> Family:
    return Family(f"{model}ForMaskedLM", f"{model}Config", sizes, batches.text, **options)


def _routers_in_float32(model: Any) -> None:
    for name, module in model.named_modules():
        if name.endswith("router"):
            module.float()


WRITTEN: dict[str, Family] = {
    "gemma": _causal("Gemma", HEAD8),
    "gemma2": _causal("Gemma2", HEAD8),
    "gemma3": Family("Gemma3ForCausalLM", "Gemma3TextConfig", GEMMA3, batches.text),
    "gemma-classifier": Family(
        "GemmaForSequenceClassification", "GemmaConfig", {**HEAD8, **LABELLED}, batches.classified
    ),
    "phi": _causal("Phi", {**GROUPED, "num_key_value_heads": 4, "resid_pdrop": 0.0}),
    "phi3": _causal("Phi3", PADDED),
    "falcon": _causal("Falcon", {**SIZES, "use_cache": False}),
    "falcon-alibi": _causal("Falcon", {**SIZES, "use_cache": False, "alibi": True}),
    "falcon-heads": _causal("Falcon", {**SIZES, "use_cache": False, "multi_query": False}),
    "falcon-groups": _causal("Falcon", {**SIZES, **FALCON_GROUPS}),
    "mpt": _causal("Mpt", {"d_model": 32, "n_heads": 4, "n_layers": 4, "vocab_size": WORDS, "use_cache": False}),
    "stablelm": _causal("StableLm", GROUPED),
    "cohere": _causal("Cohere", PADDED),
    "olmo": _causal("Olmo", PADDED),
    "olmo2": _causal("Olmo2", PADDED),
    "granite": _causal("Granite", GROUPED),
    "starcoder2": _causal("Starcoder2", {**GROUPED, "residual_dropout": 0.0, "embedding_dropout": 0.0}),
    "smollm3": _causal("SmolLM3", PADDED),
    "nemotron": _causal("Nemotron", GROUPED),
    "gpt-neox": _causal("GPTNeoX", {**DENSE, "use_cache": False}),
    "gpt-bigcode": _causal("GPTBigCode", GPT),
    "gpt-bigcode-heads": _causal("GPTBigCode", {**GPT, "multi_query": False}),
    "codegen": _causal("CodeGen", {**GPT, "rotary_dim": 4, "n_ctx": 32}),
    "biogpt": _causal("BioGpt", BIOGPT),
    "mamba": _causal("Mamba", STATES),
    "mamba2": _causal("Mamba2", MAMBA2),
    "falcon-mamba": _causal("FalconMamba", STATES),
    "lfm2": _causal("Lfm2", {**PADDED, "layer_types": ["conv", "full_attention"] * 2}),
    "recurrent-gemma": _causal("RecurrentGemma", {**HEAD8, "lru_width": 32, "attention_window_size": 8}),
    "rwkv": _causal("Rwkv", RWKV),
    "olmoe": _causal("Olmoe", {**EXPERTS, "pad_token_id": 0}),
    "granite-moe": _causal("GraniteMoe", LOCAL_EXPERTS),
    "qwen2-moe": _causal("Qwen2Moe", SHARED),
    "qwen3-next": _causal("Qwen3Next", NEXT),
    "gpt-oss": _causal("GptOss", {**LOCAL_EXPERTS, "head_dim": 8}),
    "jamba": _causal("Jamba", JAMBA),
    "deepseek-v2": _causal("DeepseekV2", LATENT),
    "deepseek-v3": _causal("DeepseekV3", LATENT),
    "bart": Family("BartForConditionalGeneration", "BartConfig", PAIR, batches.text),
    "pegasus": _pairs("Pegasus"),
    "mbart": _pairs("MBart"),
    "marian": Family("MarianMTModel", "MarianConfig", PAIR, batches.pair),
    "blenderbot": _pairs("Blenderbot"),
    "m2m-100": _pairs("M2M100", {**PAIR, "encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0}),
    "led": _pairs("LED", LED),
    "mt5": _pairs("MT5", T5),
    "umt5": _pairs("UMT5", T5),
    "longt5": _pairs("LongT5", {**T5, "local_radius": 3}),
    "switch": _pairs("SwitchTransformers", SWITCH, tolerance=1e-5, why="routers", prepare=_routers_in_float32),
    "deberta": _masked("Deberta", RELATIVE),
    "deberta-v2": _masked("DebertaV2", {**RELATIVE, "position_buckets": 8}),
    "modernbert": _masked("ModernBert", {**DENSE, "pad_token_id": 0, "local_attention": 4}),
    "electra": _masked("Electra", {**ENCODER, "embedding_size": 16}),
    "distilbert": _masked("DistilBert", {**DISTILLED, "attention_dropout": 0.0}),
    "mpnet": _masked("MPNet"),
    "xlm-roberta": _masked("XLMRoberta"),
    "convbert": _masked("ConvBert", {**POSITIONS, "embedding_size": 16}),
    "layoutlm": _masked("LayoutLM"),
    "rembert": _masked("RemBert", {**POSITIONS, "input_embedding_size": 16, "output_embedding_size": 16}),
    "longformer": _masked("Longformer", {**POSITIONS, "attention_window": 4}),
    "big-bird": _masked("BigBird", {**POSITIONS, "attention_type": "original_full"}),
    "big-bird-sparse": Family("BigBirdForMaskedLM", "BigBirdConfig", SPARSE, lambda: batches.text(24), is_alone=True),
    "fnet": Family("FNetForMaskedLM", "FNetConfig", {**POSITIONS, "tpu_short_seq_length": 8}, batches.unmasked),
    "funnel": _masked("Funnel", FUNNEL),
    "xlnet": Family("XLNetLMHeadModel", "XLNetConfig", {**XLNET, "use_mems_train": False}, batches.text),
}
