"""The class of a model in transformers, from its configuration and the user's choice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pipeflow.core.errors import UsageError
from pipeflow.huggingface.lazy_import import library
from pipeflow.huggingface.model.adapters import LOADED, has_adapters

Kind = type | str | None
"""A model class, an auto class such as transformers.AutoModelForCausalLM, or the name of one; None means the first of
`config.architectures`.
"""


def model_class(config: Any, kind: Kind) -> Any:
    """The class of a model with this configuration.

    Raises UsageError if transformers lacks the class, or if the configuration names none.
    """
    transformers = library()
    if kind is None:
        named = getattr(config, "architectures", None)
        if not named:
            raise UsageError(
                f"the {type(config).__name__} names no architectures, so the model's class is unknown: pass "
                "kind=transformers.AutoModelForCausalLM, or another auto class or model class"
            )
        kind = str(named[0])
    if getattr(config, "quantization_config", None) is not None:
        raise UsageError("the model is quantized, which pipeflow does not support: use its weights in 16 or 32 bits")
    if isinstance(kind, str):
        found = getattr(transformers, kind, None)
        if found is None:
            raise UsageError(
                f"transformers {transformers.__version__} has no class {kind!r}: pass the model's class or an auto "
                "class as kind="
            )
        kind = found
    if isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel):
        return kind
    mapping = getattr(kind, "_model_mapping", None)
    if mapping is None:
        raise UsageError(f"kind must be a model class or an auto class of transformers, got {kind!r}")
    if type(config) not in mapping:
        raise UsageError(
            f"{getattr(kind, '__name__', kind)} has no model for a {type(config).__name__}: pass another class as kind="
        )
    return _chosen(mapping[type(config)], config)


def _chosen(found: Any, config: Any) -> Any:
    """The class among several that the configuration names, else the first."""
    if not isinstance(found, list | tuple):
        return found
    named = getattr(config, "architectures", None) or []
    return next((each for each in found if each.__name__ in named), found[0])


def read_config(folder: Path, kind: Kind) -> Any:
    """Reads the configuration in a folder. Raises UsageError if it is missing or transformers cannot read it."""
    transformers = library()
    if not folder.is_dir():
        raise UsageError(
            f"{folder} is not a folder: pass one written by save_pretrained, or downloaded from a hub, as by "
            "huggingface_hub.snapshot_download"
        )
    if has_adapters(folder) and not (folder / "config.json").is_file():
        raise UsageError(f"{folder} has adapters of peft, without the model: {LOADED}")
    if not (folder / "config.json").is_file():
        raise UsageError(f"{folder} has no config.json: pass the folder of a transformers model")
    reader = getattr(kind, "config_class", None) or transformers.AutoConfig
    try:
        return reader.from_pretrained(folder, local_files_only=True)
    except (ValueError, KeyError, OSError) as error:
        raise UsageError(
            f"transformers {transformers.__version__} cannot read {folder / 'config.json'}: {error}"
        ) from error
