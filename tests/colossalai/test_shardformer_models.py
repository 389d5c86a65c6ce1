"""ShardFormer with models of transformers: its optimizations, ChatGLM's names, and adapters under a Booster."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipeflow.colossalai.booster import Booster
from pipeflow.colossalai.booster.plugin import HybridParallelPlugin
from pipeflow.colossalai.shardformer import ShardConfig, ShardFormer
from pipeflow.core.errors import UsageError
from pipeflow.engine.parallel.sharding import splits_of
from pipeflow.testing import run_threads
from tests.colossalai.boosted import TOLERANCE, causal_loss, require_as_plain
from tests.stages.families import make

transformers = pytest.importorskip("transformers", reason="not installed", exc_type=ImportError)
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


def gradients(module: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    causal_loss(module(**batch), batch).backward()
    return {name: each.grad for name, each in module.named_parameters() if each.grad is not None}


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["qwen3", "gpt2"])
def test_without_a_booster(name: str) -> None:
    """Called and differentiated as ever; also where the gradient of a whole weight comes in parts (Qwen3's q_norm)."""
    module, batch = make(transformers, name)
    expected = gradients(copy.deepcopy(module), batch)

    def rank() -> tuple[dict[str, Tensor], dict[str, Any]]:
        made, shared = ShardFormer(ShardConfig()).optimize(copy.deepcopy(module))
        assert shared == []
        splits = splits_of(made)
        return gradients(made, batch), {key: splits.get(id(each)) for key, each in made.named_parameters()}

    (first, splits), (second, _) = run_threads(rank, 2, tensor=2)
    assert any(splits.values())
    for key, gradient in expected.items():
        split = splits[key]
        for whole in [split.joined([first[key], second[key]])] if split else [first[key], second[key]]:
            assert (whole - gradient).abs().max() <= TOLERANCE * max(float(gradient.abs().max()), 1e-3), key


@pytest.mark.exhaustive
def test_optimizations_change_no_more_than_rounding() -> None:
    module, batch = make(transformers, "llama")
    expected = module(**batch).logits
    module.set_attn_implementation("eager")  # type: ignore[operator]  # a model of transformers
    fused, _ = ShardFormer(
        ShardConfig(enable_tensor_parallelism=False, enable_fused_normalization=True, enable_flash_attention=True)
    ).optimize(module)
    assert fused.config._attn_implementation == "sdpa"  # type: ignore[union-attr]  # likewise
    kinds = {type(each) for each in fused.modules() if "RMSNorm" in type(each).__name__}
    assert [kind.__mro__[1].__name__ for kind in kinds] == ["_Fused"]
    assert torch.allclose(fused(**batch).logits, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.exhaustive
def test_norms_of_another_kind_stay() -> None:
    """Gemma's multiply by 1 + weight."""
    module, batch = make(transformers, "gemma2")
    expected = module(**batch).logits
    config = ShardConfig(enable_tensor_parallelism=False, enable_all_optimization=True)
    assert torch.allclose(ShardFormer(config).optimize(module)[0](**batch).logits, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.exhaustive
def test_models_that_choose_no_attention() -> None:
    module, _ = make(transformers, "bloom")
    assert not module._supports_sdpa
    with pytest.raises(UsageError, match="enable_flash_attention: the attention of BloomForCausalLM cannot be"):
        ShardFormer(ShardConfig(enable_tensor_parallelism=False, enable_flash_attention=True)).optimize(module)


@pytest.mark.exhaustive
def test_chatglm_is_glm() -> None:
    from pipeflow.colossalai.shardformer.modeling.chatglm2_6b.configuration_chatglm import ChatGLMConfig
    from pipeflow.colossalai.shardformer.modeling.chatglm2_6b.modeling_chatglm import (
        ChatGLMForConditionalGeneration,
        ChatGLMModel,
    )

    sizes = {"num_layers": 2, "padded_vocab_size": 64, "hidden_size": 32, "ffn_hidden_size": 48, "kv_channels": 8}
    sizes |= {"num_attention_heads": 4, "seq_length": 32}
    config = ChatGLMConfig(**sizes, multi_query_attention=True, multi_query_group_num=2)
    assert isinstance(config, transformers.GlmConfig)
    assert {name: getattr(config, name) for name in sizes} == sizes
    assert config.num_key_value_heads == 2
    assert ChatGLMConfig(**sizes).num_key_value_heads == 4
    assert ChatGLMConfig().num_layers == 28
    with pytest.raises(UsageError, match="is transformers' GlmConfig here, which only supports rmsnorm=True"):
        ChatGLMConfig(**sizes, rmsnorm=False)
    assert isinstance(ChatGLMModel(config), transformers.GlmModel)
    torch.manual_seed(0)
    module = ChatGLMForConditionalGeneration(config).double()
    words = torch.randint(3, 50, (4, 8), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": words, "labels": words}
    require_as_plain(module, batch, causal_loss, {"tp_size": 2, "pp_size": 2, "num_microbatches": 2})


@pytest.mark.exhaustive
def test_lora_under_a_booster() -> None:
    """Only the adapters learn, and their optimizer has states of nothing else."""
    peft = pytest.importorskip("peft", reason="not installed", exc_type=ImportError)

    def adapted() -> tuple[nn.Module, dict[str, Tensor]]:
        module, batch = make(transformers, "llama")
        torch.manual_seed(0)
        config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False, lora_dropout=0.0)
        booster = Booster(plugin=HybridParallelPlugin(1, 2, num_microbatches=2, precision="fp32"))
        with pytest.raises(UsageError, match="needs a lora_config for new adapters, or the pretrained_dir"):
            booster.enable_lora(module)
        return booster.enable_lora(module, lora_config=config), batch

    module, batch = run_threads(adapted, 2)[0]
    trained = sum(each.numel() for each in module.parameters() if each.requires_grad)
    states = require_as_plain(module, batch, causal_loss, {"tp_size": 1, "pp_size": 2, "num_microbatches": 2})
    assert sum(states) == trained


PLANNED = ("roberta", "albert", "ernie", "gpt-neo", "gptj", "beit", "swin", "swinv2", "qwen2", "blip-2", "sam")
QUICK = ("roberta", "gpt-neo", "beit")
CAUSAL = ("gpt-neo", "gptj", "qwen2", "blip-2")  # transformers computes their losses in float32
ROUNDED = {"gpt-neo": 1e-5, "gptj": 1e-5}  # transformers computes their attention in float32, whatever the weights are


def own_loss(outputs: Any, inputs: Any) -> Tensor:
    """The model's; SAM has none."""
    loss: Tensor = outputs["loss"] if "loss" in outputs else outputs["pred_masks"].square().mean()
    return loss


@pytest.mark.some(1)
@pytest.mark.parametrize("layout", [(2, 1), (1, 2), (2, 2)], ids=["tp2", "pp2", "tp2 x pp2"])
@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.exhaustive) for name in PLANNED]
)
def test_families_that_colossalai_plans(name: str, layout: tuple[int, int]) -> None:
    """They need no policy."""
    tensor, pipeline = layout
    module, batch = make(transformers, name)
    options = {"tp_size": tensor, "pp_size": pipeline, "microbatch_size": 1}
    criterion = causal_loss if name in CAUSAL else own_loss
    require_as_plain(module, batch, criterion, options, deadline=120.0, tolerance=ROUNDED.get(name, TOLERANCE))
