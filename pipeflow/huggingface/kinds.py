"""Which class of transformers a model is of, from a configuration and what the user asks for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pipeflow.core.errors import UsageError
from pipeflow.huggingface.library import library

Kind = type | str | None
"""A model class, or an auto class such as transformers.AutoModelForCausalLM, or the name of one of them; None for the
first of `config.architectures`.
"""


def model_class(config: Any, kind: Kind) -> Any:
    """The class of a model of this configuration.

    Raises UsageError for one that transformers lacks, and where the configuration names none.
    """
    transformers = library()
    if kind is None:
        named = getattr(config, "architectures", None)
        if not named:
            raise UsageError(
                f"the {type(config).__name__} names no architectures, so the model's class is not known: pass "
                "kind=transformers.AutoModelForCausalLM, or another auto class or model class"
            )
        kind = str(named[0])
    if getattr(config, "quantization_config", None) is not None:
        raise UsageError(
            "the model is quantized, which pipeflow cannot cut or train: take its weights in 16 or 32 bits"
        )
    if isinstance(kind, str):
        found = getattr(transformers, kind, None)
        if found is None:
            raise UsageError(
                f"transformers {transformers.__version__} has no class {kind!r}: pass kind= the model's class itself, "
                "or an auto class"
            )
        kind = found
    if isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel):
        return kind
    mapping = getattr(kind, "_model_mapping", None)
    if mapping is None:
        raise UsageError(f"kind must be a model class or an auto class of transformers, got {kind!r}")
    if type(config) not in mapping:
        raise UsageError(f"{getattr(kind, '__name__', kind)} has no model of a {type(config).__name__}")
    return _chosen(mapping[type(config)], config)


def _chosen(found: Any, config: Any) -> Any:
    """Of several classes that which the configuration names, else the first."""
    if not isinstance(found, list | tuple):
        return found
    named = getattr(config, "architectures", None) or []
    return next((each for each in found if each.__name__ in named), found[0])


def read_config(folder: Path, kind: Kind) -> Any:
    """The configuration in a folder. Raises UsageError where there is none, or one that transformers cannot read."""
    transformers = library()
    if not folder.is_dir():
        raise UsageError(
            f"{folder} is no folder: give one that save_pretrained wrote, or that a hub's model was downloaded to, as "
            "by huggingface_hub.snapshot_download"
        )
    if not (folder / "config.json").is_file():
        raise UsageError(f"{folder} has no config.json: it is no folder of a model of transformers")
    reader = getattr(kind, "config_class", None) or transformers.AutoConfig
    try:
        return reader.from_pretrained(folder, local_files_only=True)
    except (ValueError, KeyError, OSError) as error:
        raise UsageError(
            f"transformers {transformers.__version__} cannot read {folder / 'config.json'}: {error}"
        ) from error
