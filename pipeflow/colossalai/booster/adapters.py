"""LoRA, with the package peft."""

from __future__ import annotations

import os
from typing import Any

from torch import nn

from pipeflow.core.errors import UsageError


class Adapters:
    """The methods of a Booster that add adapters to a model before it is boosted."""

    def enable_lora(
        self, model: nn.Module, pretrained_dir: str | os.PathLike[str] | None = None, lora_config: Any = None
    ) -> Any:
        """Returns the model with LoRA adapters. Make the optimizer from its parameters, then boost both. All ranks get
        the same initial weights if they were seeded alike.

        Args:
            model: the model.
            pretrained_dir: folder of trained adapters.
            lora_config: a peft.LoraConfig for new adapters.

        Raises UsageError if neither is given, or if peft is not installed.
        """
        if (pretrained_dir is None) == (lora_config is None):
            raise UsageError("enable_lora needs a lora_config for new adapters, or the pretrained_dir of trained ones")
        try:
            import peft
        except ImportError as error:
            raise UsageError("this needs the package peft: pip install peft") from error
        if pretrained_dir is not None:
            return peft.PeftModel.from_pretrained(model, pretrained_dir, is_trainable=True)
        return peft.get_peft_model(model, lora_config)
