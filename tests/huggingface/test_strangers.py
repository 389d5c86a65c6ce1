"""Architectures of transformers that the code was not written with in mind, under the Trainer on two stages: the losses
of one process. How each of more than a hundred others is cut is tested in `tests/stages`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pipeflow import Pipeline
from pipeflow.testing import run_threads
from tests.huggingface.trainers import BATCH, make_arguments, schedule_here

pytest.importorskip("transformers", "5", reason="not installed, or too old for some", exc_type=ImportError)
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

from pipeflow.adapters.libraries import transformers_library  # noqa: E402  # after the skip
from pipeflow.huggingface import Trainer  # noqa: E402  # after the skip

transformers: Any = transformers_library()
Sizes = dict[str, Any]
TEXT: Sizes = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "pad_token_id": 0,
}
TEXT |= {"num_hidden_layers": 4, "max_position_embeddings": 32}
GROUPED: Sizes = {**TEXT, "num_key_value_heads": 2, "head_dim": 8}
EXPERTS: Sizes = {**GROUPED, "num_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2}
EXPERTS |= {
    "moe_intermediate_size": 16,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
BOTH: Sizes = {"vocab_size": 64, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "ffn_dim": 48}
BOTH |= {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48}
BOTH |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "dropout": 0.0, "attention_dropout": 0.0}
SIGHT: Sizes = {"image_size": 32, "patch_size": 8, "num_labels": 3, "drop_path_rate": 0.0}
SIGHT |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
WINDOWS: Sizes = {
    **SIGHT,
    "patch_size": 2,
    "embed_dim": 16,
    "depths": [1, 1, 2],
    "num_heads": [2, 2, 2],
    "window_size": 4,
}
STEPS: Sizes = {**SIGHT, "depths": [1, 1, 1, 1], "hidden_sizes": [8, 16, 16, 32], "num_attention_heads": [1, 1, 2, 2]}
STRANGERS: dict[str, tuple[str, Sizes]] = {
    "Qwen3Moe": ("ForCausalLM", EXPERTS),
    "Swin": ("ForImageClassification", WINDOWS),
    "PLBart": ("ForConditionalGeneration", BOTH),
    "Exaone4": ("ForCausalLM", {**GROUPED, "sliding_window": 4}),
    "Ernie4_5": ("ForCausalLM", GROUPED),
    "Arcee": ("ForCausalLM", GROUPED),
    "Helium": ("ForCausalLM", GROUPED),
    "Cohere2": ("ForCausalLM", {**GROUPED, "sliding_window": 4}),
    "HunYuanDenseV1": ("ForCausalLM", GROUPED),
    "SeedOss": ("ForCausalLM", {**GROUPED, "attention_dropout": 0.0, "residual_dropout": 0.0}),
    "Glm4Moe": ("ForCausalLM", EXPERTS),
    "XGLM": ("ForCausalLM", {**BOTH, "num_layers": 4, "attention_heads": 4}),
    "EuroBert": ("ForMaskedLM", {**GROUPED, "mask_token_id": 3}),
    "Swinv2": ("ForImageClassification", WINDOWS),
    "Pvt": ("ForImageClassification", STEPS),
}


def make(name: str) -> Any:
    kind, sizes = STRANGERS[name]
    torch.manual_seed(0)
    return getattr(transformers, f"{name}{kind}")(getattr(transformers, f"{name}Config")(**sizes))


def data(name: str) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)

    def sample() -> dict[str, Tensor]:
        if "Image" in STRANGERS[name][0]:
            images = torch.randn(3, 32, 32, generator=generator)
            return {"pixel_values": images, "labels": torch.randint(3, (), generator=generator)}
        words = torch.randint(3, 64, (8,), generator=generator)
        return {"input_ids": words, "attention_mask": torch.ones_like(words), "labels": words}

    return [sample() for _ in range(3 * BATCH)]


def losses_of(trainer: Any) -> list[float]:
    trainer.train()
    return [each["loss"] for each in trainer.state.log_history if "loss" in each]


def arguments(folder: Path) -> Any:
    return make_arguments(folder, max_steps=3, gradient_accumulation_steps=1)


def trained(name: str, folder: Path, weights: dict[str, Tensor]) -> list[float]:
    """On a rank. Ranks are threads, which draw from one generator, so weights come from outside."""
    module, samples = make(name), data(name)
    module.load_state_dict(weights)
    example = {key: torch.stack([each[key] for each in samples[:BATCH]]) for key in samples[0]}
    model = Pipeline.from_module(module, schedule_here(4), example)
    return losses_of(Trainer(model, arguments(folder), train_dataset=samples))


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", STRANGERS)
def test_strangers_train_as_in_one_process(name: str, tmp_path: Path) -> None:
    module = make(name)
    weights = {key: each.clone() for key, each in module.state_dict().items()}
    expected = losses_of(transformers.Trainer(module, arguments(tmp_path), train_dataset=data(name)))
    for losses in run_threads(trained, 2, name, tmp_path, weights, deadline=200.0):
        assert losses == pytest.approx(expected, abs=1e-5)
