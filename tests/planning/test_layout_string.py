"""Layout strings are read as Megatron-LM reads them, planned, and written so that they read back equal."""

from __future__ import annotations

import pytest

from pipeflow import GPT, Cluster, Placement, Setup, UsageError, make_schedule, plan
from pipeflow.planning.layout_string import LayoutString

PLANNED = [  # string, pipeline ranks, layers of each stage
    # NVIDIA/Megatron-LM, docs/source/api-guide/pipeline_parallel_layout.md
    ("E||t|L", 4, [0, 0, 1, 0]),
    # NVIDIA/Megatron-LM, tests/unit_tests/transformer/test_transformer_block.py
    ("Et|t*4|t|tL", 2, [1, 4, 1, 1]),
    ("E|t*6|t|L", 2, [0, 6, 1, 0]),
    ("E|t|t*2|t||(t|)*2,t*2,L", 4, [0, 1, 2, 1, 0, 1, 1, 2]),
    # NVIDIA-NeMo/Megatron-Bridge, pull request 5391: Llama 3 70B, 80 layers
    ("Et*2|(t*2|)*34,t*3|(t*2|)*3,tL", 8, [*[2] * 35, 3, 2, 2, 2, 1]),
    # a report on DeepSeek-V3 in Primus, without MTP: the layout by default and a tuned one, 61 layers each
    ("Et|(tt|)*14,t|(tt|)*15,tL", 16, [1, *[2] * 14, 1, *[2] * 15, 1]),
    ("Et|t|(tt|)*29,tL", 16, [1, 1, *[2] * 29, 1]),
    # public scripts that train DeepSeek-V3 on AMD GPUs: two layers, or one layer, per stage
    ("Et|(tt|)*30L", 8, [1, *[2] * 30, 0]),
    ("E|(t|)*61|L", 4, [0, *[1] * 61, 0, 0]),
    # a public script for reinforcement learning with Megatron-LM: a model of 48 layers
    ("Et*12|t*12|t*12|t*12L", 4, [12, 12, 12, 12]),
    # of our own: repeated borders and groups, a layer that is repeated 0 times, commas
    ("Et*2|(t*2|)*34,tL", 4, [*[2] * 35, 1]),
    ("E|*3tt,t*1,0|L", 5, [0, 0, 0, 12, 0]),
    ("E((t|)*2,tt|)*2L", 7, [1, 1, 2, 1, 1, 2, 0]),
    ("Et*0t|tL", 2, [1, 1]),
    ("EttL", 1, [2]),
]
WITH_MTP = [  # string, stages
    # NVIDIA/Megatron-LM, docs/source/api-guide/pipeline_parallel_layout.md and the test above: DeepSeek-V3
    ("Et*3|(tt|)*29,m|L", ["Ettt", *["tt"] * 29, "m", "L"]),
    ("Et*2|(tt|)*29,t|mL", ["Ett", *["tt"] * 29, "t", "mL"]),
    # NVIDIA-NeMo/Megatron-Bridge, recipes for DeepSeek-V3
    ("Et|(tt|)*30mL", ["Et", *["tt"] * 30, "mL"]),
    # NVIDIA/Megatron-LM, the guide to MTP, and modelscope/ms-swift, the options of its Megatron
    ("E|t*3|(t|)*3tt|m|L", ["E", "ttt", "t", "t", "t", "tt", "m", "L"]),
    ("E|(t|)*3,m|m||L", ["E", "t", "t", "t", "m", "m", "", "L"]),
    # a border at the end is followed by an empty stage
    ("Et|tL|", ["Et", "tL", ""]),
]


def small(layers: int) -> GPT:
    return GPT(layers=layers, hidden=64, heads=4, positions=32, vocabulary=101, tied=False)


@pytest.mark.parametrize(("text", "ranks", "layers"), PLANNED)
def test_a_layout_is_read_planned_and_written(text: str, ranks: int, layers: list[int]) -> None:
    layout, model = LayoutString.read(text), small(sum(layers))
    chunks = layout.chunks(ranks)
    name, options = ("1f1b", {}) if chunks == 1 else ("interleaved-1f1b", {"chunks": chunks})
    schedule = make_schedule(name, ranks=ranks, microbatches=4, **options)
    found = plan(model, schedule, cut=layout.cut(model.layers))
    assert [end - start for start, end in found.cut] == layers
    assert [rank.layers for rank in found.ranks] == [sum(layers[rank::ranks]) for rank in range(ranks)]
    assert sum(rank.parameters for rank in found.ranks) == model.parameters
    assert found.layout_string == str(layout)
    assert LayoutString.read(str(layout)) == layout


@pytest.mark.parametrize(("text", "stages"), WITH_MTP)
def test_mtp_layers_are_read_and_written_and_planned_in_the_last_stage(text: str, stages: list[str]) -> None:
    layout = LayoutString.read(text)
    assert list(layout.stages) == stages
    assert LayoutString.read(str(layout)) == layout
    layers = sum(stage.count("t") for stage in stages)
    if stages[-1] == "mL":
        assert LayoutString.of(layout.cut(layers), layout.mtp) == layout
        return
    with pytest.raises(UsageError, match=r"move 'm' there, before 'L'|'L' is in stage 1 of the layout's stages 0 to 2"):
        layout.cut(layers)


def test_what_is_written_is_short_and_has_no_groups_within_groups() -> None:
    assert str(LayoutString.read("E((t|)*2,tt|)*2L")) == "Et|t|tt|t|t|tt|L"
    assert str(LayoutString.read("Et,tt|" + "tttttt|" * 7 + "L")) == "Ettt|(t*6|)*7,L"


@pytest.mark.parametrize("cluster", [None, Cluster.of("a100-80gb")])
def test_a_stage_without_layers_costs_nothing_and_holds_what_it_passes_on(cluster: Cluster | None) -> None:
    """Also within a step of several replicas, whose reductions it has no part in."""
    setup, cut = Setup(data=2), LayoutString.read("E|t*4||t*4|L").cut(8)
    found = plan(small(8), make_schedule("1f1b", ranks=5, microbatches=4), setup, cluster=cluster, cut=cut)
    empty, cost = found.ranks[2], found.cost
    assert (empty.layers, empty.parameters, empty.activation_bytes, empty.idle) == (0, 0, 0, 1)
    assert empty.peak_bytes == pytest.approx(1.04 * empty.transfer_bytes)
    assert empty.transfer_bytes == found.ranks[1].transfer_bytes > 0
    times = (cost.forward, cost.backward_input, cost.backward_weight, cost.reduce)
    assert [each[2] for each in times if isinstance(each, tuple) and each] == [0] * (3 + (cluster is not None))
    whole = plan(small(8), make_schedule("1f1b", ranks=2, microbatches=4), setup, cluster=cluster)
    for name in ("forward", "backward_input", "backward_weight", "saved_bytes"):
        assert sum(getattr(cost, name)) == pytest.approx(sum(getattr(whole.cost, name)))


def test_stages_on_other_ranks_have_no_string() -> None:
    assert plan(small(8), make_schedule("zb-v", ranks=2, microbatches=4)).layout_string is None
    assert plan(small(8), make_schedule("chimera", ranks=2, microbatches=4)).layout_string is None
    assert Placement.looped(2, 2) == make_schedule("looped-bfs", ranks=2, microbatches=4, chunks=2).placement


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("Etx|tL", "unknown letter 'x' at position 3 of the layout: the letters are E (embedding), t (tr"),
        ("Et |tL", "unknown letter ' ' at position 3 of the layout"),
        ("Et(t|*2,L", "the '(' at position 3 of the layout has no ')'"),
        ("Et(t|)*2,t)L", "the ')' at position 11 of the layout has no '('"),
        ("Et|(t|)tL", "the group from position 4 of the layout is not repeated: write '*N' after it"),
        ("Et|()*2tL", "the group from position 4 of the layout is empty"),
        ("Et*|tL", "the '*' at position 3 of the layout has no number after it"),
        ("E*2t|L", "the 'E' at position 1 of the layout is one too many"),
        ("Et*2*3|L", "the '*' at position 5 of the layout repeats nothing: '*N' comes after a letter, '|' or ')'"),
        ("2t|L", "the '2' at position 1 of the layout repeats nothing"),
        ("E|((t|)*999)*999L", "the '*999' at position 13 of the layout makes over 100000 symbols"),
        ("Et*99999999|L", "the '*99999999' at position 3 of the layout makes over 100000 symbols"),
        ("t|tL", "the layout has no 'E' (embedding): it must begin with one"),
        ("", "the layout has no 'E' (embedding): it must begin with one"),
        ("Et|t", "the layout has no 'L' (head and loss): it must end with one"),
        ("tE|tL", "the layout must begin with 'E', not with the 't' at position 1"),
        ("E|L,t", "the layout must end with 'L', not with the 't' at position 5"),
        ("Etm|tL", "the 't' at position 5 of the layout comes after an 'm': MTP layers are last"),
    ],
)
def test_a_string_that_is_no_layout_is_refused_with_the_position(text: str, message: str) -> None:
    with pytest.raises(UsageError) as raised:
        LayoutString.read(text)
    assert str(raised.value).startswith(message)


def test_a_layout_that_does_not_fit_is_refused() -> None:
    layout = LayoutString.read("E|t|t|tL")
    with pytest.raises(UsageError, match="has 4 stages, which do not divide among 3 pipeline ranks: use 1, 2, 4 ranks"):
        layout.chunks(3)
    with pytest.raises(UsageError, match="has 3 layers \\('t'\\), but the model has 8"):
        layout.cut(8)
    with pytest.raises(
        UsageError, match="'E' is in stage 1 of the layout's stages 0 to 2, but Megatron-LM has the emb"
    ):
        LayoutString.read("|Et|tL").cut(2)
