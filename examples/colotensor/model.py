"""GPT-2 of transformers with logits alone as output, in known sizes; and how its parameters are split."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gpt3.model import GPTLMLoss
from pipeflow.colossalai.tensor import ColoParameter, ComputePattern, ComputeSpec, ProcessGroup, ShardSpec

__all__ = ["PRESETS", "GPTLMLoss", "GPTLMModel", "Preset", "split"]


class GPTLMModel(nn.Module):
    """A GPT-2 language model. Needs the package transformers.

    Args:
        hidden_size: width of the hidden states.
        num_layers: number of layers.
        num_attention_heads: number of heads of each layer.
        max_seq_len: maximum length of a sequence.
        vocab_size: number of tokens.
        checkpoint: recompute the layers' activations in the backward.
    """

    def __init__(
        self,
        hidden_size: int = 768,
        num_layers: int = 12,
        num_attention_heads: int = 12,
        max_seq_len: int = 1024,
        vocab_size: int = 50257,
        checkpoint: bool = False,
    ) -> None:
        from transformers import GPT2Config, GPT2LMHeadModel

        super().__init__()
        self.checkpoint = checkpoint
        config = GPT2Config(
            n_embd=hidden_size,
            n_layer=num_layers,
            n_head=num_attention_heads,
            n_positions=max_seq_len,
            vocab_size=vocab_size,
        )
        self.model: Any = GPT2LMHeadModel(config)
        if checkpoint:
            enable = getattr(self.model, "activation_checkpointing_enable", None)  # since transformers 5.23
            (enable or self.model.gradient_checkpointing_enable)()

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Returns the logits (batch, sequence, vocabulary) of tokens (batch, sequence)."""
        output = self.model(input_ids=input_ids, attention_mask=attention_mask, use_cache=not self.checkpoint)
        logits: Tensor = output[0]
        return logits


@dataclass(frozen=True)
class Preset:
    """A GPT-2 of a known size; calling it makes the model."""

    hidden_size: int
    num_layers: int
    num_attention_heads: int

    def __call__(self, checkpoint: bool = False, **options: Any) -> GPTLMModel:
        """`options` are those of GPTLMModel."""
        return GPTLMModel(**{**vars(self), "checkpoint": checkpoint, **options})


gpt2_tiny = Preset(32, 2, 4)
gpt2_medium = Preset(1024, 24, 16)
gpt2_xl = Preset(1600, 48, 32)
gpt2_10b = Preset(4096, 50, 16)

PRESETS = {name: value for name, value in list(globals().items()) if isinstance(value, Preset)}


def split(model: nn.Module, group: ProcessGroup) -> None:
    """Splits the parameters of a GPT-2, which must be ColoParameters, over the tensor ranks of `group`: embeddings and
    linear layers by their last dimension, the second layer of each MLP by its first.
    """
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            if not isinstance(parameter, ColoParameter):
                raise TypeError(f"{path}.{name} is no ColoParameter: make the model inside of ColoInitContext")
            parameter.set_process_group(group)
            if "mlp.c_proj" in path:
                if name == "weight":
                    _split(parameter, 0, group)
            elif any(each in path for each in ("mlp.c_fc", "wte", "wpe", "c_attn", "c_proj")):
                _split(parameter, -1, group)
                if "mlp.c_fc" in path and parameter.compute_spec is not None:
                    parameter.compute_spec.set_output_replicate(False)


def _split(parameter: ColoParameter, dim: int, group: ProcessGroup) -> None:
    spec = ShardSpec([dim], [group.tp_world_size()]), ComputeSpec(ComputePattern.TP1D)
    parameter.set_tensor_spec(*spec)


def floating_point_operations(model: nn.Module, tokens: int) -> float:
    """Those of a step with so many tokens: 6 per weight and token, and 2 more with recomputation (arXiv 2001.08361)."""
    return (8 if getattr(model, "checkpoint", False) else 6) * sum(each.numel() for each in model.parameters()) * tokens


def random_batch(batch_size: int, length: int, vocab_size: int, seed: int) -> tuple[Tensor, Tensor]:
    """Tokens and their mask, both (batch, sequence)."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(vocab_size, (batch_size, length), generator=generator)
    return ids, torch.ones_like(ids)
