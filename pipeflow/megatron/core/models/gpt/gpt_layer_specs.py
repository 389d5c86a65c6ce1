"""Megatron-LM's `megatron.core.models.gpt.gpt_layer_specs`."""

from __future__ import annotations

from pipeflow.megatron.core.transformer.spec_utils import ModuleSpec
from pipeflow.models.gpt import GPTBlock


def get_gpt_layer_local_spec() -> ModuleSpec:
    """Returns the only kind of layer, `pipeflow.models.GPTBlock`."""
    return ModuleSpec(GPTBlock)
