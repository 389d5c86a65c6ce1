from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipeflow import GPT, Placement, Setup, make_schedule, plan
from pipeflow.planning.physical import stage_costs
from tests.cli.run import error, out

GPT3 = ["gpt3-175b", "--pipeline", 8, "--tensor", 8, "--data", 1, "--microbatches", 64]


def read(capsys: pytest.CaptureFixture[str], *argv: object) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(out(capsys, "plan", *argv, "--json"))
    return found


def test_gpt_3_for_programs(capsys: pytest.CaptureFixture[str]) -> None:
    found = read(capsys, *GPT3)
    assert 174e9 < found["parameters_total"] < 176e9
    assert len(found["ranks"]) == 8
    assert found["makespan_bubble_ratio"] == pytest.approx(7 / 71, abs=0.003)
    assert found["even_makespan_bubble_ratio"] == pytest.approx(7 / 71)
    first, last = found["ranks"][0], found["ranks"][-1]
    assert first["peak_bytes"] > last["peak_bytes"]
    assert first["parameters"] * 64 == pytest.approx(found["parameters_total"], rel=0.03)
    assert 60 < first["peak_bytes"] / 2**30 < 80  # as it was trained: on devices with 80 GB


def test_gpt_3_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    shown = out(capsys, "plan", *GPT3)
    assert "\x1b" not in shown
    assert max(map(len, shown.splitlines())) <= 80
    assert "gpt3-175b: 174,604,836,864 parameters, 96 layers" in shown
    assert "1f1b on 64 devices: pipeline 8 x tensor 8 x data 1\n" in shown
    rows = [line for line in shown.splitlines() if line[:1].isdigit() and "GiB" in line]
    assert [row.split()[0] for row in rows] == [str(rank) for rank in range(8)]
    assert "bubble: 9.6% (idle time of rank 7, the busiest rank)\n  With equal stages: 9.9%." in shown
    assert "with 12 of the 96 layers and the head, worth 0.33 layers" in shown


def test_a_plan_prints_as_the_command_prints_it(capsys: pytest.CaptureFixture[str]) -> None:
    found = plan(GPT.named("gpt3-175b"), make_schedule("1f1b", ranks=8, microbatches=64), Setup(tensor=8))
    shown, printed = out(capsys, "plan", *GPT3), str(found)
    tables = [
        [row.split() for row in text.splitlines() if row[:1].isdigit() and "GiB " in row] for text in (shown, printed)
    ]
    assert tables[0] == tables[1]
    assert [row[0] for row in tables[1]] == [str(rank) for rank in range(8)]
    for line in ("1f1b on 64 devices: pipeline 8 x tensor 8 x data 1", "bubble: 9.6% (idle time of rank 7"):
        assert line in shown
        assert line in printed
    assert found._repr_html_().count("<tr>") == 9
    assert "<td>7</td>" in found._repr_html_()


@pytest.mark.parametrize(
    "options", [["--schedule", "zb-v"], ["--data", 4, "--zero", "--checkpoint"], ["--flops", 1e14]]
)
def test_it_reads_well_whatever_is_asked(capsys: pytest.CaptureFixture[str], options: list[object]) -> None:
    shown = out(capsys, "plan", "gpt2-xl", *options)
    assert max(map(len, shown.splitlines())) <= 80
    for option, said in {"--zero": "ZeRO-1", "--checkpoint": "that is recomputed", "--flops": "tokens/s"}.items():
        assert (said in shown) == (option in options)


def test_options_reach_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    plain = read(capsys, "tiny")
    assert (len(plain["ranks"]), plain["microbatches"], plain["schedule"]) == (4, 8, "1f1b")
    assert read(capsys, "tiny", "--layers", 16)["parameters_total"] == GPT(16, 128, 4, 256, 2048).parameters
    halved = read(capsys, "tiny", "--sequence", 128)["ranks"][0]["activation_bytes"]
    assert halved == plain["ranks"][0]["activation_bytes"] / 2
    for more in (["--microbatch-size", 2], ["--precision", "float32"], ["--keep-scores"]):
        assert read(capsys, "tiny", *more)["ranks"][0]["peak_bytes"] > plain["ranks"][0]["peak_bytes"]
    shared = ["--data", 8, "--zero"], ["--tensor", 2, "--sequence-parallel"], ["--checkpoint"]
    for less in shared:
        assert read(capsys, "tiny", *less)["ranks"][0]["peak_bytes"] < plain["ranks"][0]["peak_bytes"]
    chunked = read(capsys, "tiny", "--schedule", "interleaved-1f1b", "--pipeline", 2, "--chunks", 4)
    assert [rank["parts"] for rank in chunked["ranks"]] == [
        [[0, 1], [2, 3], [4, 5], [6, 7]],
        [[1, 2], [3, 4], [5, 6], [7, 8]],
    ]
    timed = read(capsys, "tiny", "--flops", 1e12)
    assert (timed["unit"], plain["unit"]) == ("s", "layer forwards")
    assert timed["tokens_per_second"] == pytest.approx(timed["tokens"] / timed["makespan"])


def test_all_models_are_planned_and_their_sizes_are_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert read(capsys, "llama3-8b")["parameters_total"] == 8_030_261_248
    assert read(capsys, "vit-b16")["tokens"] == 8 * 197
    sizes = ["--kv-heads", 2, "--gated", "--biases", "none", "--norm", "rms", "--no-tied", "--no-position-table"]
    found = read(capsys, "tiny", *sizes, "--ffn", 384, "--experts", 4, "--experts-per-token", 2)
    told = {"kv_heads": 2, "gated": True, "biases": "none", "norm": "rms", "tied": False, "position_table": False}
    assert {name: found["model"][name] for name in told} == told
    layer = 128 * (2 * 128 + 2 * 64) + 4 * (3 * 128 * 384) + 4 * 128 + 2 * 128
    assert found["parameters_total"] == 8 * layer + 2 * 2048 * 128 + 128
    shown = out(capsys, "plan", "mixtral-8x7b")
    assert "mixtral-8x7b: 46,702,792,704 parameters, 32 layers" in shown
    assert "8 experts: a token uses 2, 12.9B parameters\n" in shown
    assert read(capsys, "vit-b16", "--image", 384)["tokens"] == 8 * (24 * 24 + 1)


@pytest.mark.parametrize(
    "more", [["--device", "h100-80gb"], ["--devices", 8, "--batch", 64, "--device", "h100-80gb", "--expert", 1]]
)
def test_a_mixture_without_expert_ranks_says_what_no_time_has(
    capsys: pytest.CaptureFixture[str], more: list[object]
) -> None:
    sizes = ["--experts", 4, "--experts-per-token", 2, "--gated"]
    more = [*more, *([] if "--devices" in more else ["--data", 2])]
    said = "each tensor rank has a part of every expert, so no token is sent (--expert)"
    assert any(said in each for each in read(capsys, "tiny", *sizes, *more)["not_priced"])
    assert said in " ".join(out(capsys, "plan", "tiny", *map(str, [*sizes, *more])).split())
    assert read(capsys, "tiny", *more)["not_priced"] == []


def test_hybrids_and_configs_of_transformers_reach_the_plan(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    given = ["--pattern", "M-M*-M-M", "--parts-alone", "--scan-state", 16, "--scan-heads", 8]
    found, plain = read(capsys, "tiny", *given), read(capsys, "tiny")
    assert found["parameters_total"] != plain["parameters_total"]
    path, sizes = tmp_path / "config.json", ["--sequence", 64, "--device", "h100-80gb"]
    entries = {"model_type": "llama", "num_hidden_layers": 8, "hidden_size": 128, "intermediate_size": 512}
    entries |= {"num_attention_heads": 4, "vocab_size": 2048, "max_position_embeddings": 256}
    path.write_text(json.dumps(entries | {"tie_word_embeddings": False}), encoding="utf-8")
    shown = " ".join(out(capsys, "plan", str(path), *map(str, [*sizes, "--offload-optimizer"])).split())
    layer = 4 * 128**2 + 3 * 128 * 512 + 2 * 128
    assert f": {8 * layer + 2 * 2048 * 128 + 128:,} parameters, 8 layers, hidden 128" in shown
    assert "100% of the optimizer on the host" in shown
    path.write_text(json.dumps(entries), encoding="utf-8")
    said = "config.json: the config has no tie_word_embeddings: write it into the file"
    assert said in error(capsys, "plan", str(path))


def test_words_of_megatron_bridge_reach_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    """Each alone changes the memory or the time of a step, and its setup says so."""
    layout = ["deepseek-v2-lite", "--pipeline", 1, "--data", 8, "--expert", 8, "--expert-tensor", 1, "--zero", 1]
    asked = [*layout, "--microbatch-size", 2, "--device", "gb200"]
    plain = read(capsys, *asked)
    for option, value, name, said in (
        ("--precision", "mxfp8", "precision", "mxfp8"),
        ("--precision", "nvfp4", "precision", "nvfp4"),
        ("--recompute-modules", "moe_act,layernorm", "recompute_modules", ["moe_act", "layernorm"]),
        ("--offload-layers", 6, "offload_layers", 6),
        ("--offload-optimizer", 0.5, "offload_optimizer", 0.5),
        ("--cuda-graphs", "attn,moe_router", "cuda_graphs", ["attn", "moe_router"]),
        ("--dispatcher", "deepep", "dispatcher", "deepep"),
        ("--context", 2, "context", 2),
    ):
        found = read(capsys, *asked, option, value)
        layout = found["layout"]
        assert (layout["precision"]["name"] if name == "precision" else layout[name]) == said
        same = (found["step_seconds"], found["peak_bytes"]) == (plain["step_seconds"], plain["peak_bytes"])
        assert not same, option


def test_ranks_that_share_sequences_and_experts_reach_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--experts", 4, "--experts-per-token", 2, "--gated", "--biases", "none", "--device", "h100-80gb"]
    sizes += ["--data", 4]
    whole = read(capsys, "tiny", *sizes)
    shared = read(capsys, "tiny", *sizes, "--context", 2, "--expert", 4, "--expert-tensor", 1, "--imbalance", 1.1)
    assert (shared["layout"]["context"], shared["layout"]["expert"]) == (2, 4)
    assert (whole["devices"], shared["devices"]) == (16, 32)
    experts = 2 * 3 * 3 * 128 * 512  # of each rank's two layers, three of four experts less
    assert whole["ranks"][1]["parameters"] - shared["ranks"][1]["parameters"] == experts
    assert not any("imbalance" in each for each in shared["not_priced"])


@pytest.mark.parametrize(("given", "said"), [("2", 2), ("0,1,0,1,0,1,0,1", [0, 1] * 4), ("[0]*7+[1]", [*[0] * 7, 1])])
def test_experts_in_some_layers_are_a_number_or_a_list(
    capsys: pytest.CaptureFixture[str], given: str, said: Any
) -> None:
    sizes = ["--experts", 4, "--experts-per-token", 2, "--biases", "none", "--dense-ffn", 256]
    found = read(capsys, "tiny", *sizes, "--expert-layers", given)
    assert found["model"]["expert_layers"] == said
    mlp = 2 * 128 * 512
    kinds = [0, 1] * 4 if said == 2 else said
    layers = [4 * mlp + 4 * 128 if has else mlp / 2 for has in kinds]
    own = [rank["parameters"] - 2 * (4 * 128 * 128 + 4 * 128) for rank in found["ranks"]]
    assert own[1:3] == [sum(layers[2:4]), sum(layers[4:6])]
    shown = out(capsys, "plan", "tiny", *map(str, [*sizes, "--expert-layers", given]))
    assert f"4 experts in {sum(kinds)} of 8 layers: a token uses 2" in shown


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["tiny", "--expert-layers", "2"], "expert_layers=2 needs experts of at least 2"),
        (["deepseek-v3", "--expert-layers", "2"], "dense_layers=3 and expert_layers both say .*: give dense_layers=0"),
        (["mixtral-8x7b", "--expert-layers", "0,1"], "has 2 numbers for 32 layers: give one for each layer"),
        (["mixtral-8x7b", "--expert-layers", "33"], "expert_layers=33 leave no layer of 32 with experts"),
        (["mixtral-8x7b", "--expert-layers", "[0]*32"], "zeros alone in expert_layers leave no layer of 32"),
        (["mixtral-8x7b", "--expert-layers", "0"], "expert_layers must be an integer of at least 1"),
        (["mixtral-8x7b", "--expert-layers", "[0]*"], "it must be a number, or 0 or 1 for each layer"),
        (["mixtral-8x7b", "--expert-layers", "[1]*9999999"], "cannot be repeated 9999999 times"),
        (["mixtral-8x7b", "--moe-layer-freq", "2"], "did you mean --expert-layers"),
    ],
)
def test_experts_in_impossible_layers_are_refused(
    capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    assert re.search(message, error(capsys, "plan", *words))


def test_recomputation_and_zero_are_choices_and_alone_what_they_were(capsys: pytest.CaptureFixture[str]) -> None:
    def layout(*argv: object) -> tuple[str, int]:
        found = read(capsys, "tiny", *argv)["layout"]
        return found["checkpoint"], found["zero"]

    assert layout() == layout("--checkpoint", "none", "--zero", 0) == ("none", 0)
    assert layout("--checkpoint", "--zero") == layout("--checkpoint", "full", "--zero", 1) == ("full", 1)
    assert layout("--checkpoint", "selective") == ("selective", 0)


def test_a_schedule_that_is_searched_for_is_given_the_costs_of_the_stages(capsys: pytest.CaptureFixture[str]) -> None:
    """The head is worth many of these layers, so another order is found than for equal stages."""
    model = replace(GPT.named("tiny"), vocabulary=50304)
    costs = stage_costs(model, Placement.linear(4), Setup())
    made, even = (make_schedule("zb-auto", ranks=4, microbatches=8, cost=cost, memory_cap=2) for cost in (costs, None))
    said = read(capsys, "tiny", "--vocabulary", 50304, "--schedule", "zb-auto", "--memory-cap", 2)
    found = said["even_makespan_bubble_ratio"]
    assert found == plan(model, made).even_makespan_bubble_ratio != plan(model, even).even_makespan_bubble_ratio


def test_a_file_is_as_good_as_a_name(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    out(capsys, "export", "zb-h1", "--ranks", 2, "--microbatches", 4, "--csv", path)
    filed, named = (
        read(capsys, "tiny", "--schedule", path),
        read(capsys, "tiny", "--schedule", "zb-h1", "--pipeline", 2, "--microbatches", 4),
    )
    assert filed | {"schedule": "zb-h1"} == named
    said = error(capsys, "plan", "tiny", "--schedule", path, "--pipeline", 2)
    assert said == f"--pipeline is for named schedules; {path} has its own ranks"


def test_layers_are_cut_as_asked(capsys: pytest.CaptureFixture[str]) -> None:
    def layers(*options: object) -> list[int]:
        return [rank["layers"] for rank in read(capsys, "gpt2-small", "--pipeline", 3, *options)["ranks"]]

    assert layers() == layers("--cut", "even") == layers("--cut", "4,4,4") == [4, 4, 4]
    assert layers("--cut", "5,6,1") == [5, 6, 1]
    balanced = ["--cut", "cost", "--device", "a100-40gb"]
    assert layers(*balanced)[-1] < 4  # the head counts
    steps = [
        read(capsys, "gpt2-small", "--pipeline", 3, *options)["step_seconds"] for options in (balanced[2:], balanced)
    ]
    assert steps[1] < steps[0]
    assert sum(layers("--cut", "cost", "--schedule", "zb-auto", "--microbatches", 4)) == 12


def test_memory_has_parts_and_it_is_said_where_it_does_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    small, large = ["gpt2-small", "--device", "t4", "--precision", "fp16"], ["gpt3-13b", "--device", "a100-40gb"]
    for argv, fits in ((small, True), (large, False)):
        found = read(capsys, *argv)
        assert sum(found["peak_parts"].values()) == pytest.approx(found["peak_bytes"])
        assert found["peak_parts"]["allocator"] > 0
        assert found["fits"] is fits
        shown = out(capsys, "plan", *argv)
        assert ("does not fit: " in shown) is not fits
        assert max(map(len, shown.splitlines())) <= 80
    assert read(capsys, "gpt2-small")["fits"] is None


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["gpt3-157b"], "unknown model 'gpt3-157b'; did you mean 'gpt3-175b'?"),
        (["tiny", "--schedule", "1f1"], "unknown schedule '1f1'; did you mean '1f1b'?"),
        (["tiny", "--chunks", 2], "schedule '1f1b' does not take chunks; its options are extra_warmup"),
        (["tiny", "--tensor", 3], "tensor=3 does not divide 4 heads and hidden 128: the nearest that work are 2 and 4"),
        (
            ["tiny", "--pipeline", 11],
            "8 layers cannot fill 11 stages on 11 ranks: use fewer ranks or chunks, at most 10 st",
        ),
        (["tiny", "--sequence", 512], "a sequence of 512 tokens is too long for a model with 256 positions"),
        (["tiny", "--flops", "nan"], "flops must be positive and finite"),
        (["tiny", "--data", "0"], "data must be an integer of at least 1, got 0"),
        (["tiny", "--zero", 4], "argument --zero: invalid choice: 4"),
        (["tiny", "--zero", 2], "zero=2 needs one pipeline rank, got 4: a stage adds up the whole gradients of all"),
        (["tiny", "--image", 32, "--patch", 4], "tiny takes no --image, --patch; its sizes are --layers, --hidden"),
        (["vit-b16", "--vocabulary", 100], "vit-b16 takes no --vocabulary; its sizes are --layers, --hidden"),
        (["vit-b16", "--norm", "batch"], "argument --norm: invalid choice: 'batch'"),
        (["tiny", "--precision", "int8"], "argument --precision: invalid choice: 'int8'"),
        (["tiny", "--cut", "2,2,2"], "--cut has 3 stages, but the schedule has 4: give 4 numbers"),
        (["tiny", "--cut", "2,2,2,2", "--schedule", "zb-v"], "--cut has 4 stages, but the schedule has 8, on 4 ranks"),
        (["tiny", "--cut", "2,2,2,1"], "--cut has 7 layers, but the model has 8: add 1 to its numbers"),
        (["tiny", "--cut", "2,2,2,4"], "--cut has 10 layers, but the model has 8: take 2 from its numbers"),
        (["tiny", "--cut", "4,5,-1,0"], "argument --cut: it must be even or cost, or one number of layers per stage"),
        (["tiny", "--cut", "fair"], "argument --cut: it must be even or cost, or one number of layers per stage"),
        (["tiny", "--cut", "cost", "--pipeline", 11], "8 layers cannot fill 11 stages on 11 ranks"),
        (
            ["tiny", "--device", "t4", "--link-bandwidth", "32GB"],
            "argument --link-bandwidth: it must be a number in by",
        ),
        (["tiny", "--network-bandwidth", "1e9"], "--network-bandwidth describes a cluster: say of which devices"),
    ],
)
def test_what_cannot_be_is_said(capsys: pytest.CaptureFixture[str], argv: list[object], message: str) -> None:
    assert error(capsys, "plan", *argv).startswith(message)


def test_the_first_and_the_last_rank_may_have_layers_of_their_own(capsys: pytest.CaptureFixture[str]) -> None:
    def layers(*argv: object) -> list[int]:
        return [rank["layers"] for rank in read(capsys, "tiny", *argv)["ranks"]]

    assert layers("--first-stage-layers", 1, "--last-stage-layers", 1) == [1, 3, 3, 1]
    assert layers("--last-stage-layers", 2) == [2, 2, 2, 2]
    assert layers("--layers", 14, "--last-stage-layers", 2) == [4, 4, 4, 2]
    looped = ["--layers", 16, "--schedule", "interleaved-1f1b", "--chunks", 2, "--first-stage-layers", 4]
    assert layers(*looped, "--last-stage-layers", 4) == [4, 4, 4, 4]
    assert layers("--layers", 20, *looped[2:], "--last-stage-layers", 0) == [4, 8, 8, 0]


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--first-stage-layers", 3], "8 layers leave 5 for 3 other ranks of 1 stages each, which do not divide"),
        (["--first-stage-layers", 9], "8 layers leave -1 for 3 other ranks"),
        (["--last-stage-layers", -1], "--last-stage-layers must be at least 0"),
        (["--last-stage-layers", 2, "--cut", "cost"], "--last-stage-layers exclude --cut: give one of them"),
        (["--last-stage-layers", 2, "--schedule", "zb-v"], "need a schedule with stage i on rank i modulo its ranks"),
        (
            ["--last-stage-layers", 1, "--schedule", "interleaved-1f1b"],
            "1 layers of the last rank do not divide over its 2 stages: use a multiple",
        ),
        (
            ["--last-stage-layers", 1, "--first-stage-layers", 2, "--pipeline", 1],
            "one pipeline rank is the first and the last: it cannot have 2 and 1 layers",
        ),
    ],
)
def test_layers_of_the_ends_that_cannot_be_are_refused(
    capsys: pytest.CaptureFixture[str], argv: list[object], said: str
) -> None:
    assert said in error(capsys, "plan", "tiny", *argv)
