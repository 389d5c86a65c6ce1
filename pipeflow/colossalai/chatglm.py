"""ColossalAI's ChatGLM: transformers' GLM, the same architecture, with ChatGLM's names for its sizes. Weights have
GLM's names.
"""

from __future__ import annotations

from typing import Any

from pipeflow.adapters.libraries import transformers_library
from pipeflow.core.errors import UsageError

NAMES = {
    "num_layers": "num_hidden_layers",
    "padded_vocab_size": "vocab_size",
    "ffn_hidden_size": "intermediate_size",
    "kv_channels": "head_dim",
    "multi_query_group_num": "num_key_value_heads",
    "seq_length": "max_position_embeddings",
    "layernorm_epsilon": "rms_norm_eps",
    "add_qkv_bias": "attention_bias",
}
"""ChatGLM's names for GLM's sizes."""

SIZES: dict[str, Any] = {
    "num_hidden_layers": 28,
    "vocab_size": 65024,
    "hidden_size": 4096,
    "intermediate_size": 13696,
    "head_dim": 128,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "attention_bias": False,
    "pad_token_id": None,
    "eos_token_id": 2,
}
"""Sizes of ChatGLM-2 6B."""

FIXED: dict[str, Any] = {
    "rmsnorm": True,
    "post_layer_norm": True,
    "add_bias_linear": False,
    "apply_residual_connection_post_layernorm": False,
    "hidden_dropout": 0.0,
    "pre_seq_len": None,
    "prefix_projection": False,
    "quantization_bit": 0,
}
"""Options that have only one possible value in GLM."""


class ChatGLMConfig(transformers_library().GlmConfig):  # type: ignore[misc]  # transformers is imported when it is there
    """A configuration of GLM, by default with the sizes of ChatGLM-2 6B. Without `multi_query_attention` every head has
    its own keys and values.

    Raises UsageError for an option value that GLM does not support.
    """

    attribute_map = NAMES

    def __init__(self, **given: Any) -> None:
        for name, value in FIXED.items():
            if given.pop(name, value) != value:
                raise UsageError(
                    f"ChatGLMConfig is transformers' GlmConfig here, which only supports {name}={value!r}: use that"
                )
        sizes = SIZES | {NAMES.get(name, name): value for name, value in given.items()}
        grouped = sizes.pop("multi_query_attention", "num_key_value_heads" in sizes)
        groups = sizes.get("num_key_value_heads", 1) if grouped else sizes["num_attention_heads"]
        super().__init__(**{**sizes, "num_key_value_heads": groups})


ChatGLMModel = transformers_library().GlmModel
ChatGLMForConditionalGeneration = transformers_library().GlmForCausalLM
