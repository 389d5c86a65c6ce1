"""The class of a model in transformers, from its configuration and the user's choice; Model, a Pipeline with those
attributes of such a model that scripts read; and a batch with which it is planned. Must not contain: training,
generation and weights.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pipeflow.adapters.huggingface.generation import generate
from pipeflow.adapters.huggingface.peft_adapters import LOADED, has_adapters
from pipeflow.adapters.libraries import transformers_library
from pipeflow.core.errors import UsageError
from pipeflow.engine.runtime.pipeline import Pipeline

Kind = type | str | None
"""A model class, an auto class such as transformers.AutoModelForCausalLM, or the name of one; None means the first of
`config.architectures`.
"""


def model_class(config: Any, kind: Kind) -> Any:
    """The class of a model with this configuration.

    Raises UsageError if transformers lacks the class, or if the configuration names none.
    """
    transformers = transformers_library()
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
    transformers = transformers_library()
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


class Model(Pipeline):
    """A Pipeline of a transformers model. See Pipeline for the arguments."""

    @property
    def config(self) -> Any:
        """The model's configuration, which this rank's first stage reads."""
        chunk: Any = self.chunks[0]
        return chunk.root.config

    def get_input_embeddings(self) -> nn.Embedding:
        """The input embeddings of the whole model, on the meta device: with a shape, but without values."""
        rows, width = self._whole.get_input_embeddings().weight.shape
        return nn.Embedding(rows, width, device="meta")

    def resize_token_embeddings(self, new_num_tokens: int | None = None, *_: Any, **__: Any) -> nn.Embedding:
        """Returns the input embeddings if they have `new_num_tokens` rows, or for None. Otherwise raises UsageError."""
        embeddings = self.get_input_embeddings()
        if new_num_tokens not in (None, embeddings.num_embeddings):
            raise UsageError(
                f"a Pipeline cannot resize its embeddings from {embeddings.num_embeddings} to {new_num_tokens} rows: "
                "resize them in transformers (model.resize_token_embeddings, model.save_pretrained), then load that "
                "folder"
            )
        return embeddings

    @property
    def _whole(self) -> Any:
        chunk: Any = self.chunks[0]
        return chunk.whole


_SHOWN = ("config", "generation_config", "main_input_name", "dtype", "add_model_tags")


def show_attributes(model: Any) -> None:
    """Gives a Pipeline the attributes of its module that trainers read, and `generate`."""
    root = model.chunks[0].root
    for name in _SHOWN:
        if not hasattr(model, name) and hasattr(root, name):
            setattr(model, name, getattr(root, name))
    if not hasattr(model, "generate"):
        model.generate = partial(generate, model)


_LENGTH = 8
_PER_TOKEN = ("ForCausalLM", "LMHeadModel", "ForMaskedLM", "ForConditionalGeneration", "ForTokenClassification")
_PER_SAMPLE = ("ForSequenceClassification",)
_IMAGES, _MASKED_IMAGES = "ForImageClassification", "ForMaskedImageModeling"
_ONE_CLASS = "single_label_classification"


def example_for(model: Any, samples: int, shares: int = 0) -> dict[str, Tensor]:
    """A batch of `samples` sequences of 8 tokens, or of images, with labels, as the model's loss takes them.

    Args:
        model: the model.
        samples: their number.
        shares: of how many tokens a sequence must have a multiple if its tokens are shared, over context ranks or in
            slices; it then has positions instead of a mask. 0: they are not.

    Raises UsageError for a model that does not take `input_ids` or `pixel_values`, and labels of a known shape.
    """
    name, config = type(model).__name__, model.config
    if model.main_input_name == "pixel_values" and name.endswith((_IMAGES, _MASKED_IMAGES)):
        return _of_images(config, samples, is_masked=name.endswith(_MASKED_IMAGES))
    is_per_token = name.endswith(_PER_TOKEN)
    is_per_sample = name.endswith(_PER_SAMPLE) and not config.is_encoder_decoder  # these need a configuration's tokens
    if model.main_input_name != "input_ids" or not (is_per_token or is_per_sample):
        raise UsageError(f"no example batch is known for {name}: pass one, as in from_pretrained(..., example=batch)")
    if shares:
        tokens = torch.ones(samples, _LENGTH * shares, dtype=torch.long)
        return {"input_ids": tokens, "position_ids": tokens.cumsum(1) - 1, "labels": torch.ones_like(tokens)}
    tokens = torch.ones(samples, _LENGTH, dtype=torch.long)
    return {
        "input_ids": tokens,
        "attention_mask": torch.ones_like(tokens),
        "labels": torch.ones_like(tokens) if is_per_token else _per_sample(config, samples),
    }


def _of_images(config: Any, samples: int, *, is_masked: bool) -> dict[str, Tensor]:
    """Images of the configuration's size, with labels, or with masks of their patches."""
    height, width = _pair(config.image_size)
    images = torch.zeros(samples, config.num_channels, height, width)
    if not is_masked:
        return {"pixel_values": images, "labels": _per_sample(config, samples)}
    high, wide = _pair(config.patch_size)
    masks = torch.ones(samples, (height // high) * (width // wide), dtype=torch.long)
    return {"pixel_values": images, "bool_masked_pos": masks}


def _pair(size: Any) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else (int(size[0]), int(size[1]))


def _per_sample(config: Any, samples: int) -> Tensor:
    """Labels of a classifier: a class per sample; else, as in regressions, a number for each."""
    if config.problem_type == _ONE_CLASS or (config.problem_type is None and config.num_labels > 1):
        return torch.zeros(samples, dtype=torch.long)
    return torch.zeros(samples, config.num_labels)
