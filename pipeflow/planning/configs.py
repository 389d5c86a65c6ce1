"""Configs: the sizes of a model from the text of its `config.json`, as transformers writes it. Must not contain: what
follows from sizes.

What the file does not say is not guessed: a missing entry is an error, and so is a value that plans do not count. A
sequence has `max_position_embeddings` tokens unless a setup says otherwise.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from pipeflow.core.errors import UsageError, unknown
from pipeflow.planning.transformer import GPT

LETTERS = {"mamba": "M", "linear_attention": "M", "attention": "*", "full_attention": "*", "mlp": "-", "moe": "E"}
"""Words of `layer_types` and `layers_block_type`, and their letters in a pattern."""
NOT_COUNTED = ("attention_bias", "mlp_bias", "mamba_proj_bias", "use_bias", "num_nextn_predict_layers")
"""Entries that must be false or missing."""


class _Config:
    """The entries of a file."""

    def __init__(self, entries: Mapping[str, Any]) -> None:
        self.entries = entries

    def __call__(self, *names: str) -> Any:
        """The entry with the first of these names that is there. Raises UsageError if there is none."""
        for name in names:
            if self.entries.get(name) is not None:
                return self.entries[name]
        raise UsageError(f"the config has no {' or '.join(names)}: write it into the file")

    def number(self, *names: str) -> int:
        """An entry that is a whole number. Raises UsageError for anything else."""
        value = self(*names)
        if isinstance(value, bool) or not isinstance(value, int):
            raise UsageError(f"{names[0]} of the config must be a whole number, got {value!r}")
        return value

    def letters(self, *names: str) -> str:
        """A list of words for layers, as letters of a pattern."""
        words = self(*names)
        if isinstance(words, str):
            return words
        if strange := [word for word in words if word not in LETTERS]:
            raise UsageError(f"{names[0]} of the config has {strange[0]!r}, which plans do not count")
        return "".join(LETTERS[word] for word in words)

    @property
    def usual(self) -> dict[str, Any]:
        """The sizes that all families have."""
        number = self.number
        heads, key = number("num_attention_heads"), self.entries.get("num_key_value_heads")
        width = self.entries.get("head_dim") or self.entries.get("attention_head_dim")
        return {
            "layers": number("num_hidden_layers"),
            "hidden": number("hidden_size"),
            "heads": heads,
            "kv_heads": heads if key is None else key,
            "head_size": width,
            "positions": number("max_position_embeddings"),
            "vocabulary": number("vocab_size"),
            "tied": bool(self("tie_word_embeddings")),
            "position_table": False,
            "dropout": False,
            "gated": True,
            "norm": "rms",
            "biases": "none",
        }


def _dense(config: _Config) -> dict[str, Any]:
    return config.usual | {"ffn": config.number("intermediate_size")}


def _mixtral(config: _Config) -> dict[str, Any]:
    each = {"experts": config.number("num_local_experts"), "experts_per_token": config.number("num_experts_per_tok")}
    return _dense(config) | each


def _chunks(config: _Config) -> dict[str, Any]:
    """The sizes of a scan by chunks, as Bamba and Granite name them."""
    width = config.number("mamba_expand") * config.number("hidden_size")
    heads, each = config.number("mamba_n_heads"), config("mamba_d_head")
    if each not in ("auto", width // heads):
        raise UsageError(f"mamba_n_heads={heads} of mamba_d_head={each} are not mamba_expand x hidden_size = {width}")
    return {
        "scan_width": width,
        "scan_heads": heads,
        "scan_state": config.number("mamba_d_state"),
        "scan_groups": config.number("mamba_n_groups"),
        "scan_conv": config.number("mamba_d_conv"),
        "scan_chunk": config.number("mamba_chunk_size"),
    }


def _bamba(config: _Config) -> dict[str, Any]:
    attends = config("attn_layer_indices")
    pattern = "".join("*" if layer in attends else "M" for layer in range(config.number("num_hidden_layers")))
    return _dense(config) | _chunks(config) | {"pattern": pattern}


def _granite(config: _Config) -> dict[str, Any]:
    shared = config.number("shared_intermediate_size")
    sizes = config.usual | _chunks(config) | {"pattern": config.letters("layer_types", "layers_block_type")}
    if not config.number("num_local_experts"):
        return sizes | {"ffn": shared}
    experts = {"experts": config.number("num_local_experts"), "experts_per_token": config.number("num_experts_per_tok")}
    return sizes | experts | _shared(config.number("intermediate_size"), shared)


def _shared(ffn: int, shared: int) -> dict[str, Any]:
    """Experts of a width, with a shared one of another width, which counts as several."""
    if shared % ffn:
        raise UsageError(f"a shared expert of {shared} is no multiple of the others of {ffn}, as plans count it")
    return {"ffn": ffn, "shared_experts": shared // ffn}


def _jamba(config: _Config) -> dict[str, Any]:
    layers, number = range(config.number("num_hidden_layers")), config.number
    period, offset = number("attn_layer_period"), number("attn_layer_offset")
    rank = config("mamba_dt_rank")
    sizes = _dense(config) | {
        "pattern": "".join("*" if layer % period == offset else "M" for layer in layers),
        "scan_width": number("mamba_expand") * number("hidden_size"),
        "scan_state": number("mamba_d_state"),
        "scan_rank": -(-number("hidden_size") // 16) if rank == "auto" else rank,
        "scan_conv": number("mamba_d_conv"),
    }
    if number("num_experts") == 1:
        return sizes
    period, offset = number("expert_layer_period"), number("expert_layer_offset")
    experts = {"experts": number("num_experts"), "experts_per_token": number("num_experts_per_tok")}
    experts["dense_ffn"] = number("intermediate_size")
    return sizes | experts | {"expert_layers": tuple(int(layer % period == offset) for layer in layers)}


def _nemotron(config: _Config) -> dict[str, Any]:
    pattern = config.letters("hybrid_override_pattern", "layers_block_type")
    config = _Config({"num_hidden_layers": len(pattern), **config.entries})
    number = config.number
    sizes = config.usual | {
        "pattern": pattern,
        "parts_alone": True,
        "gated": False,
        "scan_width": number("mamba_num_heads") * number("mamba_head_dim"),
        "scan_heads": number("mamba_num_heads"),
        "scan_state": number("ssm_state_size"),
        "scan_groups": number("n_groups"),
        "scan_conv": number("conv_kernel"),
        "scan_chunk": number("chunk_size"),
    }
    if "E" not in pattern:
        return sizes | {"ffn": number("intermediate_size")}
    shared = number("moe_shared_expert_intermediate_size") * number("n_shared_experts")
    experts = {"experts": number("n_routed_experts"), "experts_per_token": number("num_experts_per_tok")}
    dense = {"dense_ffn": number("intermediate_size")} if "-" in pattern else {}
    return sizes | experts | dense | _shared(number("moe_intermediate_size"), shared)


FAMILIES: Mapping[str, Callable[[_Config], dict[str, Any]]] = MappingProxyType(
    {
        "llama": _dense,
        "mistral": _dense,
        "qwen2": lambda config: _dense(config) | {"biases": "qkv"},
        "qwen3": lambda config: _dense(config) | {"head_norms": True},
        "mixtral": _mixtral,
        "bamba": _bamba,
        "granitemoehybrid": _granite,
        "jamba": _jamba,
        "nemotron_h": _nemotron,
    }
)
"""By `model_type`: the function that reads a config."""


def model_in(text: str) -> GPT:
    """The model that the text of a `config.json` describes.

    Raises UsageError for a text that is no JSON object, for a `model_type` that is not in FAMILIES, for missing
    entries, for values that plans do not count, and as `GPT`.
    """
    try:
        entries = json.loads(text)
    except ValueError as error:
        raise UsageError(f"a config of transformers is JSON: {error}") from None
    if not isinstance(entries, dict):
        raise UsageError("a config of transformers is a JSON object, with model_type and sizes")
    config = _Config(entries)
    family = config("model_type")
    if family not in FAMILIES:
        raise unknown("model_type", str(family), FAMILIES)
    if wrong := [name for name in NOT_COUNTED if entries.get(name)]:
        raise UsageError(f"{wrong[0]} of the config is {entries[wrong[0]]!r}, which plans of {family} do not count")
    return GPT(**FAMILIES[family](config))
