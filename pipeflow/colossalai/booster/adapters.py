"""LoRA, by the package peft."""

from __future__ import annotations

import os
from typing import Any

from torch import nn

from pipeflow.core.errors import UsageError


class Adapters:
    """What a Booster adds to a model before it is boosted."""

    def enable_lora(
        self, model: nn.Module, pretrained_dir: str | os.PathLike[str] | None = None, lora_config: Any = None
    ) -> Any:
        """The model with adapters as `lora_config` says, a peft.LoraConfig, or with those in `pretrained_dir`. Make the
        optimizer of it, then boost both. All ranks draw the same first values if they were seeded alike.

        Raises UsageError without either, and where peft is not installed.
        """
        if (pretrained_dir is None) == (lora_config is None):
            raise UsageError("enable_lora takes a lora_config for new adapters, or the pretrained_dir of trained ones")
        try:
            import peft
        except ImportError as error:
            raise UsageError("this needs the package peft: pip install peft") from error
        if pretrained_dir is not None:
            return peft.PeftModel.from_pretrained(model, pretrained_dir, is_trainable=True)
        return peft.get_peft_model(model, lora_config)
