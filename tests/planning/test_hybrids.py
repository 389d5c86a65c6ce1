"""Models of scans (Mamba) and attention: their layers, parameters, operations, bytes and times, and their configs."""

from __future__ import annotations

import json
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from pipeflow import GPT, Cluster, Setup, UsageError, Wanted, find_layouts, make_schedule, plan
from pipeflow.planning.catalog import model_named
from pipeflow.planning.configs import model_in
from pipeflow.planning.kept import layer_kept, saved_bytes
from pipeflow.planning.layer_seconds import layer_exchanges
from pipeflow.planning.libraries import LIBRARIES
from pipeflow.planning.libraries.own import script
from pipeflow.planning.mesh import Mesh
from pipeflow.planning.physical import physical_costs, rates_of
from pipeflow.planning.scans import scan_flops, scan_kept, scan_made
from pipeflow.planning.shares import parameters_of, shares_of
from pipeflow.planning.similar import similar_error, unpriced
from pipeflow.planning.work import DeviceWork, layer_work
from tests.planning.random_plans import CHANGES, random_case

H100 = Cluster.of("h100-80gb")
PLAIN: dict[str, Any] = {"gated": True, "biases": "none", "norm": "rms", "dropout": False, "tied": False}
SCAN: dict[str, Any] = {"scan_state": 32, "scan_heads": 16, "scan_groups": 2, "scan_chunk": 64}
HYBRID = GPT(8, 256, 8, 512, 1000, ffn=512, position_table=False, pattern="MMM*" * 2, **SCAN, **PLAIN)
ALONE = replace(HYBRID, layers=5, pattern="M-M*-", parts_alone=True)
SINGLE = replace(HYBRID, scan_heads=None, scan_groups=1, scan_rank=16)
MIXTURE = replace(HYBRID, experts=8, experts_per_token=2, expert_layers=2, dense_ffn=512)
EVERY = [HYBRID, ALONE, SINGLE, MIXTURE]
TINY: dict[str, Any] = {
    "vocab_size": 1024,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": False,
    "max_position_embeddings": 512,
}
HEADS: dict[str, Any] = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 32, "mamba_n_groups": 1}
NEMOTRON: dict[str, Any] = {"head_dim": 16, "mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 32}
ROUTED: dict[str, Any] = {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
CONFIGS: list[tuple[str, dict[str, Any]]] = [
    ("Bamba", {"num_hidden_layers": 6, "attn_layer_indices": [2], **HEADS}),
    (
        "GraniteMoeHybrid",
        {
            "num_hidden_layers": 4,
            "intermediate_size": 32,
            "shared_intermediate_size": 64,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "layer_types": ["mamba", "mamba", "attention", "mamba"],
            **HEADS,
        },
    ),
    (
        "Jamba",
        {"num_hidden_layers": 8, "num_experts": 4, "num_experts_per_tok": 2, "mamba_dt_rank": 8, "mamba_d_state": 16}
        | {"attn_layer_period": 8, "attn_layer_offset": 4, "expert_layer_period": 2, "expert_layer_offset": 1},
    ),
    ("NemotronH", {"n_groups": 2, "layers_block_type": ["mamba", "mlp", "mamba", "attention", "mlp"], **NEMOTRON}),
    (
        "NemotronH",
        {"n_groups": 2, "layers_block_type": ["mamba", "moe", "attention", "moe"], **NEMOTRON, **ROUTED}
        | {"moe_shared_expert_intermediate_size": 64},
    ),
    ("Llama", {"num_hidden_layers": 3}),
    ("Qwen2", {"num_hidden_layers": 3}),
    ("Qwen3", {"num_hidden_layers": 3, "head_dim": 16}),
    ("Mistral", {"num_hidden_layers": 3, "head_dim": 16}),
    ("Mixtral", {"num_hidden_layers": 3, "num_local_experts": 4}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "sizes"), CONFIGS)
def test_a_config_has_the_parameters_of_its_module(name: str, sizes: dict[str, Any]) -> None:
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    config = getattr(transformers, f"{name}Config")(**TINY | sizes)
    with torch.device("meta"):
        module = transformers.AutoModelForCausalLM.from_config(config)
    found = model_in(config.to_json_string(use_diff=False))
    assert found.parameters == sum(each.numel() for each in module.parameters())
    assert found.tokens == 512


@pytest.mark.parametrize(
    ("name", "parameters", "attends"),
    [
        ("jamba-52b", 51_570_323_328, 4),
        ("bamba-9b", 9_780_235_392, 3),
        ("granite4-h-small-32b", 32.2e9, 4),
        ("granite4-h-tiny-7b", 6.94e9, 4),
        ("granite4-h-micro-3b", 3.19e9, 4),
        ("nemotron-h-8b", 8.1e9, 4),
        ("nemotron-h-56b", 56.3e9, 10),
    ],
)
def test_presets_have_the_parameters_and_the_attention_that_is_published(
    name: str, parameters: float, attends: int
) -> None:
    model = model_named(name)
    assert model.parameters == (parameters if isinstance(parameters, int) else pytest.approx(parameters, rel=0.002))
    assert sum(kind in ("dense", "experts", "attention alone") for kind in model.kinds) == attends


def test_layers_have_the_kinds_of_the_pattern() -> None:
    assert HYBRID.kinds == ("scan", "scan", "scan", "dense") * 2
    assert MIXTURE.kinds == ("scan", "scan with experts", "scan", "experts") * 2
    assert ALONE.kinds == ("scan alone", "MLP alone", "scan alone", "attention alone", "MLP alone")
    assert HYBRID.of_kind("dense") == replace(HYBRID, pattern="*" * 8, scan_state=None, scan_heads=None)
    assert ALONE.of_kind("MLP alone").attention_flops(512) == 0
    assert ALONE.of_kind("scan alone").linear_flops == 2 * 256 * (scan_made(HYBRID, 1) + 512)


def test_parts_alone_are_the_same_layers_as_pairs_of_them() -> None:
    """A layer of scan and MLP is two layers of one part each: parameters, operations and kept bytes are the same."""
    pairs = replace(HYBRID, layers=2, pattern="M*")
    alone = replace(HYBRID, layers=4, pattern="M-*-", parts_alone=True)
    assert pairs.parameters == alone.parameters
    assert pairs.flops_per_sample() == alone.flops_per_sample()
    one, other = (saved_bytes(each, Setup(), shares_of(each, [(0, each.layers)])[0]) for each in (pairs, alone))
    assert one == other
    moved = [sum(layer_work(each.of_kind(kind), Setup()).moved_bytes for kind in each.kinds) for each in (pairs, alone)]
    assert moved[0] == pytest.approx(moved[1])


def test_the_operations_of_a_scan_are_those_of_its_paper() -> None:
    """By chunks, a token has 2QN of scores in each group, and 2QP + 4NP in each head (arXiv 2405.21060)."""
    assert scan_flops(HYBRID) == 2 * 64 * 32 * 2 + 16 * (2 * 64 * 32 + 4 * 32 * 32)
    assert scan_flops(SINGLE) == 9 * 512 * 32
    work = layer_work(HYBRID, Setup())
    assert sum(each.flops for each in work.inner) == pytest.approx(512 * scan_flops(HYBRID))
    assert layer_work(SINGLE, Setup()).scalar_flops == 512 * scan_flops(SINGLE)
    assert HYBRID.of_kind("scan").attention_flops(512) == HYBRID.of_kind("scan").attention_flops(4096)


def test_the_backward_of_a_scan_takes_three_times_as_long_and_none_of_it_is_of_weights() -> None:
    """Two products for each one, and the scan is computed again, as its kernels do."""
    rates = rates_of(H100, Setup())
    for work in (DeviceWork((), inner=layer_work(HYBRID, Setup()).inner), DeviceWork((), scalar_flops=1e12)):
        found = rates.seconds(work)
        assert found.backward == pytest.approx(3 * found.forward * rates.efficiency.backward / 2)
        assert found.weight == 0
    assert found.forward == pytest.approx(1e12 / H100.device.flops["float32"])


def test_a_scan_keeps_what_its_backward_reads() -> None:
    """Gate, channels, vectors, steps and output; with one step per channel also the convolution's output."""
    assert scan_kept(HYBRID, 1) == 2 * 512 + 2 * 2 * 32 + 16 + 512
    assert scan_kept(SINGLE, 1) == 5 * 512 + 16 + 2 * 32
    scans, attention = (layer_kept(HYBRID.of_kind(kind), Setup()) for kind in ("scan", "dense"))
    assert scans - attention == 2 * (scan_kept(HYBRID, 1) + 512 - 4 * 256)
    stored = Setup(keep_scores=True)
    assert layer_kept(HYBRID.of_kind("scan"), stored) == scans
    assert layer_kept(HYBRID.of_kind("dense"), stored) > attention


@pytest.mark.parametrize("model", EVERY)
def test_tensor_ranks_have_parts_and_stages_have_their_own_layers(model: GPT) -> None:
    shares = shares_of(model, [(0, 2), (2, 3), (3, model.layers)])
    for setup in (Setup(), Setup(tensor=2)):
        each = [parameters_of(model, [share], setup).total for share in shares]
        assert sum(each) == parameters_of(model, shares, setup).total
    whole, half = (parameters_of(model, shares, Setup(tensor=tensor)).total for tensor in (1, 2))
    assert whole / 2 < half < whole * 0.52
    if model.scan_heads is not None:
        assert 2 * scan_made(model, 2) == scan_made(model, 1)
        more = [scan_made(replace(model, scan_groups=1), tensor) for tensor in (1, 2)]
        assert more[1] == more[0] / 2 + 32  # one whole group of two vectors


@pytest.mark.parametrize("model", EVERY)
def test_scans_are_planned_priced_and_searched_for(model: GPT) -> None:
    found = find_layouts(Wanted(model, H100, 4, 8), top=2)
    assert found.recommended.plan.fits
    schedule = make_schedule("1f1b", ranks=2, microbatches=4)
    setup = Setup(tensor=2, context=2, data=2)
    with_ranks = plan(model, schedule, setup, cluster=H100)
    assert with_ranks.step_seconds is not None
    assert similar_error(model, setup, H100) is None
    assert any("scans" in each for each in unpriced(model, setup))
    sums = [
        physical_costs(each, schedule.placement, Setup(tensor=2), H100, cut=[(0, 1), (1, model.layers)]).communication
        for each in (model, replace(model, pattern=model.pattern and model.pattern.replace("M", "*"), **NO_SCANS))
    ]
    assert sums[0] == pytest.approx(sums[1])  # a scan has as many sums as attention


NO_SCANS: dict[str, Any] = {"scan_state": None, "scan_heads": None, "scan_rank": None}


@pytest.mark.parametrize("model", EVERY)
def test_what_is_faster_or_smaller_is_never_worse_with_scans(model: GPT) -> None:
    for seed in range(6):
        case, random = random_case(seed), Random(seed)
        setup = Setup(tensor=random.choice((1, 2)), data=2, zero=case.setup.zero, overlap=case.setup.overlap)
        schedule = make_schedule("1f1b", ranks=random.choice((1, 2, 4)), microbatches=4)
        if setup.zero == 2 and schedule.placement.num_ranks > 1:
            setup = replace(setup, zero=1)
        case = replace(case, model=model, setup=setup, schedule=schedule)
        if "bf16" not in case.cluster.device.flops:
            continue
        before = case.plan().step_seconds
        for name, change in CHANGES.items():
            after = change(case, random.choice((1.01, 1.5, 4))).plan().step_seconds
            assert before is not None
            assert after is not None
            assert after <= before * (1 + 1e-9), f"{name} of seed {seed}"


def test_context_ranks_exchange_heads_of_scans_there_and_back_in_any_kind() -> None:
    """What the first linear made, and as many channels, in an all-to-all in the forward and in the backward."""
    scan = HYBRID.of_kind("scan")
    for setup in (Setup(context=2, context_kind="ring"), Setup(context=2, context_kind="all-to-all")):
        mesh, rates = Mesh.of(setup, 1, 8), rates_of(H100, setup)
        found = layer_exchanges(scan, setup, mesh, rates, rates.seconds(layer_work(scan, setup)))
        sent = 256 * 2 * (scan_made(scan, 1) + 512)
        assert found.forward == found.backward == rates.exchange(mesh.context_group, sent, sent).seconds > 0


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"pattern": "MM"}, "pattern has 2 letters for 8 layers: give one for each layer"),
        ({"pattern": "MMMX" * 2}, "give one for each layer, M for a scan"),
        ({"pattern": "M-M*" * 2}, "layers of one part: give parts_alone"),
        ({"pattern": None, "parts_alone": True}, "layers of one part: give parts_alone and the pattern"),
        ({"pattern": "MEM*" * 2, "parts_alone": True}, "E in pattern says which layers have experts: give experts"),
        ({"experts": 4, "parts_alone": True, "pattern": "M-M*" * 2}, "which layers have experts: it has none"),
        ({"scan_state": None}, "scan_state=None and M in pattern belong together"),
        ({"pattern": "*" * 8}, "scan_state=32 and M in pattern belong together"),
        ({"scan_rank": 16}, "give scan_heads or scan_rank"),
        ({"scan_heads": None}, "give scan_heads or scan_rank"),
        ({"scan_heads": 7}, "scan_width 512 does not divide into scan_heads=7"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message.replace("*", r"\*")):
        replace(HYBRID, **given)


@pytest.mark.parametrize(
    ("model", "setup", "message"),
    [
        (HYBRID, Setup(checkpoint="op"), "recompute all or nothing: use checkpoint full or none"),
        (HYBRID, Setup(recompute_modules=("layernorm",)), "recompute all or nothing"),
        (HYBRID, Setup(lora_rank=4), "leave out lora_rank"),
        (replace(HYBRID, scan_heads=4), Setup(tensor=8), "ranks do not divide the 4 heads of scans"),
        (replace(HYBRID, scan_heads=4), Setup(tensor=2, context=4), "ranks do not divide the 4 heads of scans"),
        (replace(HYBRID, scan_groups=3), Setup(tensor=2), "neither divides 3 groups of scans nor is a multiple"),
    ],
)
def test_layouts_that_no_plan_counts_are_refused(model: GPT, setup: Setup, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        plan(model, make_schedule("1f1b", ranks=2, microbatches=4), setup)


def test_slices_are_refused() -> None:
    with pytest.raises(UsageError, match="slices=2 are planned for models without a pattern"):
        Wanted(HYBRID, H100, 4, 8, slices=2)


@pytest.mark.parametrize("name", ["megatron", "torchtitan"])
def test_options_of_libraries_are_refused(name: str) -> None:
    found = plan(HYBRID, make_schedule("1f1b", ranks=2, microbatches=4), Setup(), cluster=H100)
    with pytest.raises(UsageError, match="for layers of attention with an MLP, and this model has a pattern"):
        LIBRARIES[name].options(found)


@pytest.mark.parametrize("sizes", [{"tensor": 2}, {"context": 2}], ids=str)
def test_no_script_divides_scans_over_ranks(sizes: dict[str, Any]) -> None:
    schedule = make_schedule("1f1b", ranks=2, microbatches=4)
    with pytest.raises(UsageError, match="leaves scans whole on each rank: --tensor 1 and --context 1 plan that"):
        script(plan(HYBRID, schedule, Setup(**sizes), cluster=H100), {})
    assert "from_module" in script(plan(HYBRID, schedule, Setup(), cluster=H100), {}).text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "mamba9"}, "unknown model_type 'mamba9'"),
        ({"hidden_size": None}, "the config has no hidden_size: write it into the file"),
        ({"hidden_size": 64.5}, "hidden_size of the config must be a whole number, got 64.5"),
        ({"mamba_proj_bias": True}, "mamba_proj_bias of the config is True, which plans of bamba do not count"),
        ({"mamba_d_head": 32}, "mamba_n_heads=8 of mamba_d_head=32 are not mamba_expand x hidden_size = 128"),
    ],
)
def test_configs_that_plans_do_not_count_are_refused(change: dict[str, Any], message: str) -> None:
    sizes: dict[str, Any] = {"model_type": "bamba", "mamba_expand": 2, "mamba_d_conv": 4, "mamba_chunk_size": 256}
    sizes |= TINY | CONFIGS[0][1]
    assert model_in(json.dumps(sizes)).kinds[2] == "dense"
    with pytest.raises(UsageError, match=message):
        model_in(json.dumps(sizes | change))
    for text in ("{", "[]"):
        with pytest.raises(UsageError, match="a config of transformers is"):
            model_in(text)
