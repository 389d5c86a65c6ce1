"""The shapes of the field: parameters as published and as transformers has them, and what follows from a shape."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from pipeflow import GPT, PRECISIONS, Placement, Setup, UsageError, make_schedule, plan
from pipeflow.planning.catalog import MODELS, Model, model_named
from pipeflow.planning.layer_kinds import ROUTED
from pipeflow.planning.physical import stage_costs
from pipeflow.planning.scans import scan_flops, scan_parameters
from pipeflow.planning.transformer import ViT
from pipeflow.planning.work import head_work

LLAMA = replace(GPT.named("llama3-8b"), layers=4, hidden=48, heads=6, kv_heads=2, ffn=80, positions=32, vocabulary=101)
ODD: dict[str, Any] = {"norm": {"norm": "batch"}, "biases": {"biases": "some"}}
MIXTURE = replace(LLAMA, experts=5, experts_per_token=2)


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("llama2-7b", 6_738_415_616),
        ("llama2-13b", 13_015_864_320),
        ("llama2-70b", 68_976_648_192),
        ("llama3-8b", 8_030_261_248),
        ("llama3-70b", 70_553_706_496),
        ("llama3.1-405b", 405_853_388_800),
        ("mistral-7b", 7_241_732_096),
        ("mixtral-8x7b", 46_702_792_704),
        ("qwen2.5-7b", 7_615_616_512),
        ("qwen2.5-32b", 32_763_876_352),
        ("qwen3-30b-a3b", 30_532_122_624),
        ("llama3.2-1b", 1_235_814_400),
        ("llama3.2-3b", 3_212_749_824),
        ("tinyllama-1.1b", 1_100_048_384),
        ("codellama-34b", 33_743_970_304),
        ("yi-34b", 34_388_917_248),
        ("ministral-8b", 8_019_808_256),
        ("mistral-nemo-12b", 12_247_782_400),
        ("mistral-small-24b", 23_572_403_200),
        ("mistral-large-123b", 122_610_069_504),
        ("mixtral-8x22b", 140_630_071_296),
        ("qwen2.5-0.5b", 494_032_768),
        ("qwen2.5-1.5b", 1_543_714_304),
        ("qwen2.5-3b", 3_085_938_688),
        ("qwen2.5-14b", 14_770_033_664),
        ("qwen2.5-72b", 72_706_203_648),
        ("qwen3-0.6b", 596_049_920),
        ("qwen3-1.7b", 1_720_574_976),
        ("qwen3-4b", 4_022_468_096),
        ("qwen3-8b", 8_190_735_360),
        ("qwen3-14b", 14_768_307_200),
        ("qwen3-32b", 32_762_123_264),
        ("qwen3-235b-a22b", 235_093_634_560),
        ("gemma-2b", 2_506_172_416),
        ("gemma-7b", 8_537_680_896),
        ("phi3-mini-4b", 3_821_079_552),
        ("phi3-medium-14b", 13_960_238_080),
        ("phi4-14b", 14_659_507_200),
        ("command-r-35b", 34_980_831_232),
        ("falcon-7b", 6_921_720_704),
        ("deepseek-v2-lite", 15_706_484_224),
        ("deepseek-v2", 235_741_434_880),
        ("vit-b16", 86_567_656),
        ("vit-b32", 88_224_232),
        ("vit-l16", 304_326_632),
        ("vit-l32", 306_535_400),
    ],
)
def test_parameters_are_those_of_the_published_weights(name: str, parameters: int) -> None:
    """Of the checkpoints on Hugging Face, and of torchvision's vision transformers."""
    assert model_named(name).parameters == parameters


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("bloom-176b", 176_247_271_424),  # a norm after the embedding
        ("gpt-j-6b", 6_053_381_344),  # no biases in attention, one in the head
        ("gpt-neox-20b", 20_554_567_680),  # two norms in a block
        ("palm-540b", 540_350_000_000),
        ("nemotron4-15b", 15_600_000_000),
        ("nemotron4-340b", 341_000_000_000),
        ("phi-2", 2_779_683_840),  # a bias in the head
        ("gemma2-2b", 2_614_341_888),  # four norms in a block
        ("gemma2-9b", 9_241_705_984),
        ("gemma2-27b", 27_227_128_320),
        ("gemma3-12b", 11_800_000_000),  # the language model alone
        ("gemma3-27b", 27_000_000_000),
        ("dbrx-132b", 131_596_523_520),
        ("phi3.5-moe-42b", 41_873_153_344),
        ("qwen2-57b-a14b", 57_400_000_000),
        ("llama4-scout-17b-16e", 107_800_000_000),  # the language model alone
        ("llama4-maverick-17b-128e", 400_700_000_000),
        ("gpt-oss-20b", 20_914_757_184),  # sinks of attention, biases of routers
        ("gpt-oss-120b", 116_829_156_672),
        ("glm4.5-355b", 352_800_000_000),  # without the layer that predicts further tokens
        ("glm4.5-air-106b", 106_850_000_000),
        ("deepseek-v3", 671_026_419_200),  # biases of routers; without the layer that predicts further tokens
        ("moonlight-16b-a3b", 15_960_000_000),
        ("kimi-k2", 1_026_408_232_448),
    ],
)
def test_parameters_are_near_those_of_models_that_have_small_parts_more(name: str, parameters: int) -> None:
    assert model_named(name).parameters == pytest.approx(parameters, rel=0.005)


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("mixtral-8x22b", 39),
        ("qwen3-235b-a22b", 22),
        ("deepseek-v3", 37),
        ("deepseek-v2", 21),
        ("kimi-k2", 32),
        ("gpt-oss-120b", 5.1),
        ("gpt-oss-20b", 3.6),
        ("llama4-scout-17b-16e", 17),
        ("llama4-maverick-17b-128e", 17.2),
    ],
)
def test_a_token_uses_as_many_parameters_as_models_print(name: str, billions: float) -> None:
    """Some count the word table and the head, gpt-oss the head alone; the numbers are rounded."""
    model = GPT.named(name)
    table = model.vocabulary * model.hidden / 1e9 if name.startswith("gpt-oss") else 0.0
    assert model.active_parameters / 1e9 - table == pytest.approx(billions, rel=0.03)


@pytest.mark.parametrize("name", ["Qwen3-Next-80B-A3B", "kimi-linear-48b"])
def test_models_that_are_no_transformers_are_refused_with_the_reason(name: str) -> None:
    with pytest.raises(UsageError, match=f"{name} cannot be planned: .*linear attention"):
        model_named(name)


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("gpt3-1.3b", 1.3),
        ("gpt3-2.7b", 2.7),
        ("gpt3-6.7b", 6.7),
        ("gpt3-13b", 13.0),
        ("gpt3-175b", 175),
        ("megatron-22b", 22),
        ("turing-530b", 530),
        ("megatron-1t", 1008),
    ],
)
def test_models_are_as_large_as_their_papers_print(name: str, billions: float) -> None:
    """arXiv 2005.14165, table 2.1; 2205.05198, table 3; 2104.04473, table 1. Their numbers are rounded."""
    assert model_named(name).parameters / 1e9 == pytest.approx(billions, rel=0.02)


def test_a_layer_that_predicts_a_further_token_is_a_layer_with_a_linear_and_the_head_again() -> None:
    """DeepSeek-V3's has 11.5 billion parameters besides the word table and the head that it shares (its README)."""
    model = GPT.named("deepseek-v3")
    further = replace(model, mtp=1)
    assert (further.parameters - model.parameters) / 1e9 == pytest.approx(11.5, abs=0.15)
    schedule, setup = make_schedule("1f1b", ranks=4, microbatches=1), Setup()
    one, other = (plan(each, schedule, setup, flops=1.0) for each in (model, further))
    assert other.ranks[2].parameters == one.ranks[2].parameters
    assert other.ranks[3].parameters - one.ranks[3].parameters == further.parameters - model.parameters
    layer = model.linear_flops + model.attention_flops(4096)
    added = layer + 2 * model.hidden * model.vocabulary + 4 * model.hidden**2
    assert other.cost.forward[3] - one.cost.forward[3] == pytest.approx(4096 * added)
    work, more = (head_work(each, setup) for each in (model, further))
    assert (
        sum(each.flops for each in more.products) == 2 * sum(each.flops for each in work.products) + 4096 * 4 * 7168**2
    )
    per_sample = further.flops_per_sample() - model.flops_per_sample()
    assert per_sample == pytest.approx(3 * 4096 * added)


def test_a_token_uses_a_part_of_a_mixture() -> None:
    """As printed: 12.9 billion (arXiv 2401.04088), 3.3 billion (arXiv 2505.09388), all of a model without experts."""
    assert model_named("mixtral-8x7b").active_parameters / 1e9 == pytest.approx(12.9, abs=0.05)
    assert model_named("qwen3-30b-a3b").active_parameters / 1e9 == pytest.approx(3.3, abs=0.06)
    assert model_named("llama3-8b").active_parameters == model_named("llama3-8b").parameters


LATENT = {  # as transformers calls these sizes
    "num_key_value_heads": 6,
    "intermediate_size": 80,
    "moe_intermediate_size": 20,
    "n_routed_experts": 6,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "q_lora_rank": 14,
    "kv_lora_rank": 10,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
}


def of_transformers(name: str, **sizes: Any) -> int:
    """Parameters of a causal model of transformers, made without memory."""
    transformers = pytest.importorskip("transformers", reason="not installed", exc_type=ImportError)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(name, **sizes))
    return int(sum(parameter.numel() for parameter in model.parameters()))


def sizes_of(model: GPT) -> dict[str, Any]:
    return {
        "num_hidden_layers": model.layers,
        "hidden_size": model.hidden,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "intermediate_size": model.ffn,
        "vocab_size": model.vocabulary,
        "tie_word_embeddings": model.tied,
        "pad_token_id": None,
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "model", "more"),
    [
        ("llama", LLAMA, {}),
        ("llama", replace(LLAMA, tied=True, head_size=10), {"head_dim": 10}),
        ("mistral", LLAMA, {}),
        ("qwen2", replace(LLAMA, biases="qkv"), {}),
        ("mixtral", MIXTURE, {"num_local_experts": 5}),
        (
            "qwen3_moe",
            replace(MIXTURE, head_size=12, head_norms=True),
            {"num_experts": 5, "moe_intermediate_size": 80, "head_dim": 12},
        ),
        (
            "deepseek_v3",
            replace(
                MIXTURE,
                kv_heads=None,
                head_size=12,
                rope_size=4,
                value_size=8,
                kv_rank=10,
                q_rank=14,
                experts=6,
                shared_experts=1,
                ffn=20,
                dense_layers=1,
                dense_ffn=80,
            ),
            LATENT,
        ),
        (
            "llama4_text",
            replace(MIXTURE, experts_per_token=1, shared_experts=1, ffn=20, expert_layers=2, dense_ffn=80),
            {"num_local_experts": 5, "num_experts_per_tok": 1, "intermediate_size": 20, "intermediate_size_mlp": 80}
            | {"interleave_moe_layer_step": 2, "head_dim": 8},
        ),
        (
            "qwen3_moe",
            replace(MIXTURE, head_size=12, head_norms=True, ffn=20, expert_layers=(0, 1, 0, 0), dense_ffn=80),
            {"num_experts": 5, "moe_intermediate_size": 20, "intermediate_size": 80, "head_dim": 12}
            | {"decoder_sparse_step": 2, "mlp_only_layers": [3]},
        ),
        (
            "gpt2",
            GPT(3, 48, 6, 32, 101, ffn=70),
            {"n_embd": 48, "n_layer": 3, "n_head": 6, "n_positions": 32, "n_inner": 70},
        ),
    ],
    ids=["llama", "tied", "mistral", "qwen2", "mixtral", "qwen3_moe", "deepseek_v3", "llama4", "qwen3-step", "gpt2"],
)
def test_parameters_are_those_of_transformers(name: str, model: GPT, more: dict[str, Any]) -> None:
    sizes = {"vocab_size": model.vocabulary} if name == "gpt2" else sizes_of(model)
    assert model.parameters == of_transformers(name, **sizes | more)


@pytest.mark.slow
def test_parameters_of_a_vit_are_those_of_transformers() -> None:
    transformers = pytest.importorskip("transformers", reason="not installed", exc_type=ImportError)
    ours = ViT(3, 48, 6, 40, 8, 17, ffn=100)
    sizes = {"num_hidden_layers": 3, "hidden_size": 48, "num_attention_heads": 6, "intermediate_size": 100}
    config = transformers.ViTConfig(image_size=40, patch_size=8, num_labels=17, **sizes)
    with torch.device("meta"):
        theirs = transformers.ViTForImageClassification(config)
    assert ours.parameters == sum(parameter.numel() for parameter in theirs.parameters())


@pytest.mark.parametrize("name", MODELS)
def test_operations_of_linears_are_two_for_each_weight_that_a_token_uses(name: str) -> None:
    """Of the layers: without biases, which are added, norms, and scans. What is left is attention's, or the scan's."""
    model = model_named(name)
    inner = replace(model, biases="none", norm="rms", head_norms=False)
    norms = inner.norms * inner.hidden + (inner.kv_rank or 0) + (inner.q_rank or 0)
    idle = (inner.experts - inner.experts_per_token) * (3 if inner.gated else 2) * inner.hidden * inner.wide
    used: dict[str, int] = {}
    for layer, kind in enumerate(inner.kinds[:-2]):
        parts = [(layer, inner.layers - 1)], [(layer + 1, inner.layers - 1)]
        own, after = map(inner.parameters_of, parts)
        table = inner.vocabulary * inner.hidden if isinstance(inner, GPT) and layer == 0 else 0
        if layer or len({*inner.kinds}) > 1:
            used[kind] = own - after - table - norms - (idle if kind in ROUTED else 0)
            used[kind] -= scan_parameters(inner, 1) if kind.startswith("scan") else 0
    assert model.of_kind(model.kinds[-1]).linear_flops == 2 * used[inner.kinds[-1]]
    linears = sum(2 * used[kind] for kind in inner.kinds)
    attends = sum(kind in ("dense", "experts", "attention alone") for kind in model.kinds)
    layers = linears + attends * 2 * model.tokens * model.heads * (model.head_width + model.value_width)
    layers += scan_flops(model) * sum(kind.startswith("scan") for kind in model.kinds)
    ends = model.tokens * (3 * model.head_flops + 2 * model.embedding_flops)
    assert model.flops_per_sample() == pytest.approx(3 * model.tokens * layers + ends, rel=1e-12)


@pytest.mark.parametrize(("name", "billions"), [("vit-b16", 17.56), ("vit-b32", 4.41), ("vit-l16", 61.55)])
def test_operations_of_a_vit_are_those_of_torchvision(name: str, billions: float) -> None:
    """It prints multiplications with additions of a forward, half as many as operations."""
    model = ViT.named(name)
    forward = (model.flops_per_sample() + model.tokens * model.embedding_flops) / 3
    assert forward / 2e9 == pytest.approx(billions, rel=0.01)


@pytest.mark.parametrize("model", [LLAMA, MIXTURE, ViT(4, 48, 6, 40, 8, 17)], ids=["llama", "mixture", "vit"])
@pytest.mark.parametrize("checkpoint", ["none", "selective", "full"])
def test_the_work_of_all_stages_is_that_of_the_model(model: Model, checkpoint: Any) -> None:
    schedule = make_schedule("1f1b", ranks=4, microbatches=4)
    cost = stage_costs(model, schedule.placement, Setup(microbatch_size=2, checkpoint=checkpoint), flops=1.0)
    again = {
        "none": 0,
        "selective": model.attention_flops(model.tokens),
        "full": model.linear_flops + model.attention_flops(model.tokens),
    }[checkpoint]
    work = sum(cost.forward) + sum(cost.backward_input) + sum(cost.backward_weight)
    said = 2 * (model.flops_per_sample() + model.layers * model.tokens * again)
    assert work == pytest.approx(said, rel=1e-12)
    found = plan(model, schedule, Setup(tensor=2))
    assert found.tokens == 4 * model.tokens
    assert all(rank.peak_bytes > 16 * rank.parameters for rank in found.ranks)


def per_layer(model: Model, **options: Any) -> tuple[float, float]:
    """Bytes per token that a layer saves, and defers."""
    cost = stage_costs(model, Placement.linear(4), Setup(**options))
    return cost.saved_bytes[1] / model.tokens, cost.deferred_bytes[1] / model.tokens


def test_grouped_heads_gates_and_experts_are_kept() -> None:
    """Numbers of 2 bytes: 4h whole; query and the output of attention; key and value; of a gated MLP 3f. No
    dropout, no masks. Two experts a token take what goes in and comes out of each, and the router's result.
    """
    split = 2 * 48 + 2 * 2 * 8 + 3 * 80
    assert per_layer(LLAMA) == (2 * (4 * 48 + split),) * 2
    assert per_layer(LLAMA, tensor=2) == (2 * (4 * 48 + split // 2),) * 2
    assert per_layer(LLAMA, tensor=2, sequence_parallel=True) == (2 * (4 * 48 + split) // 2,) * 2
    assert per_layer(LLAMA, keep_scores=True)[0] == 2 * (4 * 48 + split + 6 * 32)
    assert per_layer(MIXTURE) == (2 * (4 * 48 + split + 3 * 80 + 2 * 2 * 48 + 5),) * 2
    shared = replace(MIXTURE, shared_experts=1)
    assert per_layer(shared)[0] - per_layer(MIXTURE)[0] == 2 * 3 * 80


def test_the_ends_of_a_model_without_dropout_keep_no_mask() -> None:
    cost = stage_costs(LLAMA, Placement.linear(4), Setup())
    assert cost.saved_bytes[0] == cost.saved_bytes[1]
    assert cost.saved_bytes[-1] - cost.saved_bytes[1] == 32 * (2 * 2 * 48 + 4 * 101)


def test_ranks_beyond_the_heads_of_key_have_equal_parts_of_the_weights_and_one_head_each() -> None:
    few = replace(LLAMA, heads=12, head_size=8, kv_heads=2, ffn=96)
    two, four = few.parameters_of([(1, 2)], 2), few.parameters_of([(1, 2)], 4)
    assert two - four == (few.parameters_of([(1, 2)]) - 2 * 48) / 4
    split = 2 * 96 + 3 * 96
    assert per_layer(few, tensor=4)[0] == 2 * (4 * 48 + split // 4 + 2 * 8)


def test_a_real_layer_with_grouped_heads_and_a_gate_is_as_large() -> None:
    """Linears of the shape's widths, as torch counts them."""
    width, key, wide = 48, 2 * 8, 80
    linears = [(width, width), (width, key), (width, key), (width, width), (width, wide), (width, wide), (wide, width)]
    layer = nn.ModuleList([nn.Linear(*each, bias=False) for each in linears] + [nn.RMSNorm(width), nn.RMSNorm(width)])
    assert LLAMA.parameters_of([(1, 2)]) == sum(parameter.numel() for parameter in layer.parameters())


@pytest.mark.parametrize(("name", "width"), [("fp8", 1), ("mxfp8", 1 + 1 / 32), ("nvfp4", 0.5 + 1 / 16)])
def test_linears_keep_their_inputs_as_narrow_as_their_products(name: str, width: float) -> None:
    """Both outputs of norms, the output of attention once more, and the input of the MLP's output linear."""
    plain, narrow = 2 * 48 + 2 * 48 + 2 * 2 * 8 + 2 * 80, 2 * 48 + 48 + 80
    kept, deferred = per_layer(LLAMA, precision=PRECISIONS[name])
    assert kept == pytest.approx(2 * plain + width * narrow, abs=1)
    assert deferred == per_layer(LLAMA)[1]
    expert = per_layer(MIXTURE, precision=PRECISIONS[name])[0] - kept
    assert expert == pytest.approx(2 * (2 * 80 + 2 * 48 + 5) + width * (2 * 48 + 80), abs=1)


def test_expert_ranks_do_not_keep_outputs_of_experts() -> None:
    apart = replace(MIXTURE, experts=6)
    one, other = (per_layer(apart, data=2, expert=ranks)[0] for ranks in (1, 2))
    assert one - other == 2 * 2 * 48


@pytest.mark.parametrize("name", ["bf16-mixed", "fp16-mixed"])
def test_activations_are_as_wide_as_the_weights_whatever_the_products_are(name: str) -> None:
    stored = name.startswith("fp16")  # whose programs keep scores
    usual = per_layer(LLAMA, precision=PRECISIONS["bf16"], keep_scores=stored)
    assert per_layer(LLAMA, precision=PRECISIONS[name]) == usual
    assert PRECISIONS[name].products == name.removesuffix("-mixed")


def test_a_sequence_may_be_longer_where_positions_are_rotary() -> None:
    longer = stage_costs(LLAMA, Placement.linear(4), Setup(sequence=64), flops=1.0)
    usual = stage_costs(LLAMA, Placement.linear(4), Setup(), flops=1.0)
    assert longer.forward[1] == 2 * usual.forward[1] + 64 * 4 * 32 * 48


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: replace(LLAMA, kv_heads=4), "6 heads do not divide into kv_heads=4 groups: .* are 3 and 6"),
        (lambda: replace(LLAMA, kv_heads=0), "kv_heads must be an integer of at least 1, got 0"),
        (lambda: replace(LLAMA, experts=2, experts_per_token=3), "experts_per_token=3 is more than experts=2"),
        (lambda: replace(LLAMA, shared_experts=1), "shared_experts=1 need other experts, too"),
        (lambda: replace(LLAMA, **ODD["norm"]), "norm must be one of layer, rms; got 'batch'"),
        (lambda: replace(LLAMA, **ODD["biases"]), "biases must be one of all, qkv, none; got 'some'"),
        (lambda: LLAMA.require_tensor(4), "tensor=4 does not divide 6 heads and hidden 48: .* are 3 and 6"),
        (lambda: LLAMA.require_tensor(3), "tensor=3 neither divides 2 heads of key and value nor is a multiple"),
        (lambda: replace(LLAMA, kv_heads=6).require_tensor(3), "tensor=3 does not divide the MLP width of 80: .* 2 a"),
        (lambda: ViT(2, 48, 6, image=40, patch=7), "an image of 40 does not divide into patches of 7: .* are 5 and 8"),
        (lambda: ViT(2, 48, 6, classes=0), "classes must be an integer of at least 1, got 0"),
        (lambda: ViT.named("vit-b61"), "unknown model 'vit-b61'; did you mean 'vit-b16'?"),
        (lambda: model_named("llama3-8"), "unknown model 'llama3-8'; did you mean 'llama3-8b'?"),
        (
            lambda: stage_costs(ViT.named("vit-b16"), Placement.linear(1), Setup(sequence=196)),
            "a sequence of 196 tokens is no image of 224 in patches of 16, which has 197: change image or patch",
        ),
    ],
)
def test_what_cannot_be_is_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make()
