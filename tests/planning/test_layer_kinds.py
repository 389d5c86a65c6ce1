"""Layers of two kinds, with experts and without: which they are, and that each stage counts its own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, combinations, pairwise
from random import Random
from typing import Any

import pytest

from pipeflow import GPT, Cluster, Placement, Setup, UsageError, make_schedule, plan
from pipeflow.core.partition import Part
from pipeflow.planning.cuts import cut_by_cost, cut_by_load, cuts_to_try, fastest_cut, part_shares, profile
from pipeflow.planning.kept import gradient_bytes, recomputed_bytes
from pipeflow.planning.layer_kinds import LayerKind, expert_layers_in, expert_list, kinds_of
from pipeflow.planning.layout import Wanted
from pipeflow.planning.layout_cells import leanest_cells
from pipeflow.planning.layout_trials import trials
from pipeflow.planning.layouts import _least, find_layouts
from pipeflow.planning.physical import stage_costs
from pipeflow.planning.rank_memory import held_by
from pipeflow.planning.shares import Parameters, parameters_of, shares_of
from pipeflow.planning.similar import unpriced

PLAIN: dict[str, Any] = {"gated": True, "biases": "none", "norm": "rms", "dropout": False, "tied": False}
EVERY = GPT(8, 256, 4, 512, 1000, ffn=128, position_table=False, experts=8, experts_per_token=2, **PLAIN)
MIXED = replace(EVERY, expert_layers=(0, 1, 1, 0, 0, 0, 1, 1), dense_ffn=1024)
DENSE = MIXED.of_kind("dense")
H100 = Cluster.of("h100-80gb")
EXPERT, MLP, ROUTER = 3 * 256 * 128, 3 * 256 * 1024, 256 * 8
ATTENTION = 4 * 256 * 256 + 2 * 256


def cut_of(*sizes: int) -> list[Part]:
    return list(pairwise(accumulate(sizes, initial=0)))


def test_every_nth_layer_is_the_last_of_n() -> None:
    """As in Llama 4 and in Qwen's mixtures; a list says any layers; the first layers without are a list, too."""
    assert kinds_of(5, 2, 0) == ("dense", "experts", "dense", "experts", "dense")
    assert kinds_of(3, (1, 0, 0), 0) == ("experts", "dense", "dense")
    assert kinds_of(3, None, 2) == kinds_of(3, (0, 0, 1), 0)
    listed: Any = [0, 1] * 4
    assert replace(EVERY, expert_layers=listed) == replace(EVERY, expert_layers=(0, 1) * 4)
    assert {*EVERY.kinds} == {"experts"}
    assert {*DENSE.kinds} == {"dense"}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"expert_layers": (0, 1)}, "has 2 numbers for 8 layers: give one for each layer"),
        ({"expert_layers": (0, 2) * 4}, "1 with experts or 0 without"),
        ({"expert_layers": (0,) * 8}, "zeros alone in expert_layers leave no layer of 8 with experts"),
        ({"expert_layers": 9}, "expert_layers=9 leave no layer of 8 with experts"),
        ({"expert_layers": 0}, "expert_layers must be an integer of at least 1"),
        ({"dense_layers": 8}, "dense_layers=8 leave no layer of 8 with experts"),
        ({"dense_layers": 1, "expert_layers": 2}, "dense_layers=1 and expert_layers both say"),
        ({"experts": 1, "experts_per_token": 1, "expert_layers": 2}, "expert_layers=2 needs experts of at least 2"),
        ({"dense_ffn": 64}, "dense_ffn=64 needs dense_layers or expert_layers"),
    ],
)
def test_layers_that_cannot_be_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        replace(EVERY, **given)


def test_the_list_for_megatron_is_read_as_it_was() -> None:
    random = Random(1)
    for _ in range(200):
        numbers = tuple(random.choices((0, 1), k=random.randint(2, 9))) * random.randint(1, 4)
        kinds: tuple[LayerKind, ...] = tuple("experts" if each else "dense" for each in numbers)
        assert expert_layers_in(expert_list(kinds)) == numbers
        assert expert_layers_in(",".join(map(str, numbers))) == numbers
    assert expert_layers_in("[0] + [1]*2") == (0, 1, 1)
    assert expert_layers_in("([0]+[1])*2+[1]") == (0, 1, 0, 1, 1)


@pytest.mark.parametrize("text", ["", "x", "1,2", "[]", "[1]*", "[0]*2+", "([1]", "[1,0]*0", "[1]*2*9999999", "-1"])
def test_what_is_no_list_of_layers_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        expert_layers_in(text)


def test_a_token_uses_experts_in_some_layers_alone() -> None:
    layer = {"experts": ATTENTION + ROUTER + 8 * EXPERT, "dense": ATTENTION + MLP}
    counts = Counter(MIXED.kinds)
    ends = 2 * 1000 * 256 + 256
    assert MIXED.parameters == sum(counts[kind] * layer[kind] for kind in counts) + ends
    assert MIXED.parameters_of([(1, 2), (3, 6)]) == layer["experts"] + 3 * layer["dense"]
    assert MIXED.parameters - MIXED.active_parameters == 4 * 6 * EXPERT
    linears = sum(counts[kind] * MIXED.of_kind(kind).linear_flops for kind in counts)
    head = MIXED.head_flops
    assert MIXED.flops_per_sample() == 3 * 512 * (linears + 8 * MIXED.attention_flops(512) + head)


def test_a_layer_that_predicts_a_further_token_is_like_the_last() -> None:
    further = 3 * 256 + 2 * 256 * 256
    for list_, own in (((0, 1) * 4, ROUTER + 8 * EXPERT), ((1, 0) * 4, MLP)):
        model = replace(MIXED, expert_layers=list_)
        assert replace(model, mtp=1).parameters - model.parameters == ATTENTION + own + further
        share = shares_of(replace(model, mtp=1), [(0, 4), (4, 8)])[1]
        held = parameters_of(replace(model, mtp=1), [share], Setup(data=4, expert=4))
        assert held.experts == 2 * EXPERT * (2 + list_[-1])


def test_the_cost_of_a_stage_is_that_of_its_own_layers() -> None:
    """With neighbours that have neither end, as models of one kind have them."""
    setup = Setup(data=4, expert=4, microbatch_size=2)
    cut = cut_of(1, 2, 3, 2)
    mixed, experts = (stage_costs(model, Placement.linear(4), setup, H100, cut=cut) for model in (MIXED, EVERY))
    dense = stage_costs(DENSE, Placement.linear(4), replace(setup, expert=1), H100, cut=cut)
    for name in ("forward", "backward_input", "backward_weight", "saved_bytes", "deferred_bytes"):
        costs = [getattr(each, name) for each in (mixed, experts, dense)]
        assert costs[0][1] == pytest.approx(costs[1][1])  # layers 1 and 2
        assert costs[0][2] == pytest.approx(costs[2][2])  # layers 3 to 5
    other = stage_costs(MIXED, Placement.linear(4), setup, H100, cut=cut_of(2, 2, 2, 2))
    assert other.forward[1] == pytest.approx((experts.forward[1] + dense.forward[2] * 2 / 3) / 2)


def test_layers_with_a_checkpoint_are_the_first_ones_of_a_stage_whatever_their_kind() -> None:
    """Of stages of two layers, the first keeps its input alone."""

    def saved(model: GPT, **given: Any) -> float:
        return stage_costs(model, Placement.linear(4), Setup(**given), cut=cut_of(2, 2, 2, 2)).saved_bytes[1]

    first = {"checkpoint": "full", "checkpoint_layers": 1}
    for model, second in ((MIXED, DENSE), (replace(MIXED, expert_layers=(0, 1) * 4), EVERY)):
        assert saved(model, **first) == saved(second) / 2 + saved(EVERY, checkpoint="full") / 2


def test_a_rank_has_room_for_its_largest_layer_and_for_neighbours() -> None:
    setup, placement = Setup(data=2, checkpoint="full", zero=3), Placement.linear(4)
    held = [held_by(MIXED, setup, placement, cut_of(1, 2, 2, 3), rank) for rank in range(4)]
    one, other = ATTENTION + ROUTER + 8 * EXPERT, ATTENTION + MLP
    sizes = [tuple(sorted(each.total for each in rank.pair)) for rank in held]
    assert sizes == [(other, other), (one, one), (other, other), (one, one)]
    again, gradients = ([of(model, setup) for model in (EVERY, DENSE)] for of in (recomputed_bytes, gradient_bytes))
    largest = 0 if again[0] + gradients[0] > again[1] + gradients[1] else 1
    for rank, kind in ((1, 0), (2, 1), (3, largest)):
        assert (held[rank].recomputed_bytes, held[rank].backward_bytes) == (again[kind], gradients[kind])
    turns = replace(MIXED, expert_layers=2)
    mixed = held_by(turns, Setup(data=2, zero=3), Placement.linear(1), cut_of(8), 0)
    assert sorted(each.total for each in mixed.pair) == sorted((one, other))
    alone = held_by(turns, Setup(data=2), Placement.linear(8), cut_of(*[1] * 8), 2)
    assert alone.pair == (Parameters(other, 0),) * 2


def test_expert_ranks_share_experts_where_there_are_some() -> None:
    schedule = make_schedule("1f1b", ranks=4, microbatches=4)
    found = plan(MIXED, schedule, Setup(data=4, expert=4), cluster=H100, cut=cut_of(1, 2, 3, 2))
    middle = [rank.parameters for rank in found.ranks[1:3]]
    assert middle == [2 * (ATTENTION + ROUTER + 2 * EXPERT), 3 * (ATTENTION + MLP)]


def test_tensor_ranks_divide_the_mlps_of_layers_without_experts() -> None:
    with pytest.raises(UsageError, match="tensor=2 does not divide the MLP width of 1025"):
        replace(MIXED, dense_ffn=1025).require_tensor(2)
    replace(MIXED, expert_layers=None, dense_ffn=None, ffn=127).require_tensor(2)  # whole experts need not divide


def test_each_part_of_a_model_has_layers_of_one_kind() -> None:
    """The ends, and four runs of layers; the same kind takes as long wherever it is."""
    shares = part_shares(MIXED, Setup(), H100)
    assert sum(shares) == pytest.approx(1)
    _, dense, experts, three, more, _ = shares
    assert three == pytest.approx(3 * dense)
    assert more == pytest.approx(experts)
    weights = profile(MIXED, Setup(), H100).weights
    assert sum(weights) == pytest.approx(8)
    assert weights[0] / weights[1] == pytest.approx(dense / (experts / 2), abs=0.06)
    assert profile(EVERY, Setup(), H100).weights == ()


def test_gathers_of_layers_that_are_not_alike_are_told_to_be_those_of_a_mean_layer() -> None:
    said = "gathered as those of a mean layer"
    for model, zero, is_told in ((MIXED, 3, True), (MIXED, 1, False), (EVERY, 3, False)):
        assert any(said in each for each in unpriced(model, Setup(data=2, zero=zero))) == is_told
    assert not any(said in each for each in unpriced(MIXED, Setup(zero=3)))


def busiest(cut: Sequence[Part], weights: Sequence[float], first: float, last: float) -> float:
    layers = len(weights)
    return max(sum(weights[start:end]) + first * (start == 0) + last * (end == layers) for start, end in cut)


def test_no_cut_of_layers_of_two_kinds_has_a_lighter_busiest_rank() -> None:
    random = Random(2)
    for _ in range(60):
        layers = random.randint(4, 9)
        stages, dense = random.randint(2, min(4, layers)), random.choice((0.3, 0.6, 0.8))
        times = [random.choice((dense, 1.0)) for _ in range(layers)]
        weights = tuple(each * layers / sum(times) for each in times)
        ends = random.choice((0.0, 0.5)), random.choice((0.0, 1.5, 3.0))
        borders = combinations(range(1, layers), stages - 1)
        least = min(busiest([*pairwise((0, *each, layers))], weights, *ends) for each in borders)
        found = cut_by_load(layers, Placement.linear(stages), *ends, (), weights)
        assert busiest(found, weights, *ends) == pytest.approx(least), (weights, ends, found)


def test_ranks_with_several_stages_and_of_different_speeds_are_weighed_too() -> None:
    weights = (0.5,) * 8 + (1.5,) * 8
    ranks = [0.0, 0.0]
    for stage, (start, end) in enumerate(cut_by_load(16, Placement.looped(2, 2), 0.0, 1.0, (), weights)):
        ranks[stage % 2] += sum(weights[start:end]) + (stage == 3)
    assert max(ranks) == 8.5
    slow = cut_by_load(16, Placement.linear(2), 0.0, 0.0, (1.0, 2.0), weights)
    assert slow == ((0, 13), (13, 16))  # 11.5 on the fast rank, and 2 x 4.5 on the slow one


def test_cuts_by_costs_give_stages_of_lighter_layers_more_of_them() -> None:
    """Layers without experts take less, and the simulated cut is the best that is tried."""
    model = replace(EVERY, layers=16, ffn=1024, expert_layers=(1, 1, 1, 0, 0, 0, 0, 0) * 2, dense_ffn=64)
    schedule, setup = make_schedule("1f1b", ranks=4, microbatches=8), Setup(data=2, expert=2)
    for cluster in (None, H100):
        _, light, heavy, _ = (end - start for start, end in cut_by_cost(model, schedule.placement, setup, cluster))
        assert light > heavy

    def seconds(cut: tuple[Part, ...]) -> float:
        found = plan(model, schedule, setup, cluster=H100, cut=cut).step_seconds
        assert found is not None
        return found

    best = seconds(fastest_cut(model, schedule, setup, H100))
    own, alike = (min(map(seconds, cuts_to_try(16, schedule.placement, (), kinds))) for kinds in (model.kinds, ()))
    assert best == pytest.approx(own)
    assert own < 0.99 * alike


@pytest.mark.slow
def test_the_least_bytes_of_a_layout_count_experts_where_they_are() -> None:
    """Also those of layers that predict further tokens, which expert ranks divide."""
    task = Wanted(replace(MIXED, mtp=3, experts=64), H100, 4, 8, schedules=("1f1b",))
    for cell in leanest_cells(task):
        assert all(_least(task, cell) <= trial.least_bytes() for _, trial in trials(task, cell)), cell


@pytest.mark.slow
def test_a_search_cuts_layers_of_two_kinds_by_their_costs_too() -> None:
    model = replace(EVERY, layers=16, hidden=1024, ffn=1024, expert_layers=(0,) * 8 + (1,) * 8, dense_ffn=512)
    task = Wanted(model, H100, 2, 16, tensor=1, pipeline=2, expert=1, schedules=("1f1b",))
    [best] = find_layouts(task).ranked
    before, after = (end - start for start, end in best.layout.cut)
    assert before > after + 1
