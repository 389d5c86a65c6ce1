"""What passes between the stages of a module, counted on the wire: each rank gets what it needs once, from whoever has
it, and nothing else. The least is found by trying all ways.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from pipeflow import CostModel, Pipeline, Schedule, execute_pipeline, make_schedule
from pipeflow.core.placement import Placement
from pipeflow.engine.stages.plan import CutPlan
from pipeflow.engine.stages.planner import Planner
from pipeflow.testing import run_threads
from tests.core.test_route import least_transfers
from tests.families import make_near
from tests.runtime.skips import counted
from tests.stages.families import make
from tests.stages.models import WIDTH, Case, Dense, UNet, images, vectors
from tests.stages.test_training import Stepped, require_equal

MICROBATCHES, SAMPLES, ITEM = 4, 2, 8  # of each microbatch, in float64
BATCH = MICROBATCHES * SAMPLES
NAMES = ("gpipe", "1f1b", "interleaved-1f1b", "zb-h1", "zb-v", "dualpipe", "dualpipe-v", "chimera", "hanayo")


def dense(stages: int) -> Case:
    """A block for each stage."""
    return Case(lambda: Dense(stages), vectors, functional.mse_loss)


class Deep(UNet):
    """Three levels: six blocks down, six up."""

    def __init__(self) -> None:
        super().__init__()
        self.downs.append(nn.ModuleList([nn.Conv2d(4, 4, 3, padding=1), nn.AvgPool2d(2)]))
        self.ups.append(nn.ModuleList([nn.Upsample(scale_factor=2), nn.Conv2d(8, 4, 1)]))


UNETS = Case(Deep, images, functional.mse_loss)
Needed = list[tuple[int, tuple[int, ...], int]]  # by which stage it is made, by which it is needed, bytes a microbatch


def of_dense(stages: int) -> Needed:
    """Each block takes what all before it made; the first one's input comes with the batch."""
    return [(maker, tuple(range(maker + 1, stages)), SAMPLES * WIDTH * ITEM) for maker in range(stages - 1)]


def of_unet(plan: CutPlan) -> Needed:
    """What a stage ends with goes to the next one; what a block on the way down made is joined to the input of the one
    on the way up whose image is as large: before the second of its two calls.
    """
    names = [call.name for call in plan.trace.calls if call.name.count(".") == 2]
    blocks = [name for name in names if name.startswith(("downs", "ups"))]
    ends = [blocks.index(cut.name) for cut in plan.cuts]

    def stage_of(block: str) -> int:
        return sum(blocks.index(block) > end for end in ends)

    sizes = {call.name: call.looks[0].nbytes for call in plan.trace.calls if call.name in blocks}
    skips = {f"downs.{level}.0": f"ups.{2 - level}.1" for level in range(3)}
    needed = []
    for block in blocks:
        users = {stage_of(skips[block])} if block in skips else set()
        if blocks.index(block) in ends:
            users.add(stage_of(block) + 1)
        later = tuple(sorted(user for user in users if user > stage_of(block)))
        if later:
            needed.append((stage_of(block), later, sizes[block]))
    return needed


def least_bytes(needed: Needed, placement: Placement) -> int:
    """Of all microbatches."""
    paths = [placement.paths[microbatch % len(placement.paths)] for microbatch in range(MICROBATCHES)]
    return sum(size * least_transfers(maker, users, path) for maker, users, size in needed for path in paths)


Ran = tuple[Stepped, int, int, int, Any]


def ran(case: Case, schedule: Schedule) -> Ran:
    """A step, and what this rank has sent: activations, then gradients; then activations of an evaluation."""
    batch = case.batch(BATCH)
    with counted() as sent:
        model = Pipeline.from_module(case.module(), schedule, batch, criterion=case.criterion)
        loss = execute_pipeline(iter([batch]), model).loss
        gradients = {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}
        trained = sent.activations, sent.gradients
        for _ in range(3):
            execute_pipeline(iter([batch]), model)
        again = sent.activations, sent.gradients
        assert again == (4 * trained[0], 4 * trained[1])
        model.eval()
        evaluated = execute_pipeline(iter([(batch[0], None)]), model, forward_only=True, return_outputs=True).outputs
        alone = sent.activations - again[0]
        assert sent.gradients == again[1]
    assert model.cut is not None
    told = None if loss is None else loss.item()
    return (told, gradients), *trained, alone, (model.cut, evaluated)


def require_least(case: Case, schedule: Schedule, needed: Any) -> None:
    results = run_threads(ran, schedule.placement.num_ranks, case, schedule)
    require_equal(case, [stepped for stepped, *_ in results], BATCH)
    plan: CutPlan = results[0][-1][0]
    expected = least_bytes(needed(plan), schedule.placement)
    assert sum(activations for _, activations, *_ in results) == expected
    assert sum(gradients for _, _, gradients, *_ in results) == expected
    if len(schedule.placement.paths) == 1:  # else the two ranks of the last stage give each other their outputs
        assert sum(alone for *_, alone, _ in results) == expected
    with torch.no_grad():
        whole = case.module().eval()(case.batch(BATCH)[0])
    for *_, (_, output) in results:
        assert output is None or torch.allclose(output, whole, rtol=1e-12)


@pytest.mark.some(1)
@pytest.mark.parametrize("name", NAMES)
def test_every_block_feeds_every_later_stage(name: str) -> None:
    schedule = make_near(name, ranks=2, microbatches=MICROBATCHES)
    if schedule.placement.num_stages < 4:
        schedule = make_near(name, ranks=4, microbatches=MICROBATCHES)
    stages = schedule.placement.num_stages
    require_least(dense(stages), schedule, lambda plan: of_dense(stages))


@pytest.mark.some(1)
@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_u_net(name: str) -> None:
    schedule = make_near(name, ranks=4, microbatches=MICROBATCHES)
    require_least(UNETS, schedule, of_unet)


def test_a_u_net_of_two_ranks_hands_its_skips_over_in_memory() -> None:
    """Down on the way there, up on the way back: four stages on a vee, of which rank 0 has the first and the last."""
    planner = Planner(UNETS.module(), 4, placement=Placement.vee(2))
    plan = planner.plan(planner.entries.of(images(SAMPLES))[0])
    found = [{source: len(values) for source, values in way.takes.items()} for way in plan.ways]
    assert found == [{}, {0: 1}, {1: 2}, {2: 1, 0: 2}]
    schedule = make_schedule("zb-v", ranks=2, microbatches=MICROBATCHES)
    require_least(UNETS, schedule, of_unet)


class Choosing(nn.Module):
    """The last block is also given what the first one made, or what the second one made, as the batch says."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, values: Tensor, chosen: int = 1) -> Tensor:
        made = [values]
        for block in self.blocks[:-1]:
            made.append(torch.tanh(block(made[-1])))
        last: Tensor = self.blocks[-1](made[-1] + made[chosen])
        return last


@pytest.mark.parametrize("name", ["1f1b", "zb-v", "chimera"])
def test_what_a_batch_of_another_kind_needs_is_handed_on_where_there_is_no_route(name: str) -> None:
    schedule = make_schedule(name, ranks=2 if name == "zb-v" else 4, microbatches=2)
    case = Case(Choosing, vectors, functional.mse_loss)
    values, labels = vectors(4)
    batches = [({"values": values, "chosen": chosen}, labels) for chosen in (2, 1, 2, 1, 1)]

    def rank() -> tuple[Any, dict[str, Tensor]]:
        model = Pipeline.from_module(case.module(), schedule, batches[0], criterion=case.criterion)
        for batch in batches:
            execute_pipeline(iter([batch]), model)
        named = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
        return model.cut and model.cut.routes, named

    module = case.module()
    for inputs, _ in batches:
        functional.mse_loss(module(**inputs), labels).backward()
    expected = {name: each.grad for name, each in module.named_parameters() if each.grad is not None}
    results = run_threads(rank, schedule.placement.num_ranks)
    assert all(routes == () for routes, _ in results)
    for _, named in results:
        for each, gradient in named.items():
            assert torch.allclose(gradient, expected[each], rtol=1e-11, atol=1e-13), each
    assert set().union(*(named for _, named in results)) == set(expected)


def test_the_bytes_on_routes_are_in_the_cost_model() -> None:
    schedule = make_schedule("1f1b", ranks=3, microbatches=2)
    batch = vectors(4)
    cost = CostModel.even(schedule.placement)

    def rank() -> CostModel | None:
        case = dense(3)
        model = Pipeline.from_module(
            case.module(), schedule, batch, criterion=case.criterion, cost=replace(cost, bandwidth=10.0)
        )
        return model.runner.programs.options.cost

    one = float(SAMPLES * WIDTH * ITEM)
    for found in run_threads(rank, 3):
        assert found is not None
        assert found.activation_bytes == (one, 2 * one, 0.0)
        assert found.route_bytes == {}


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore")
def test_what_has_an_entry_per_head_counts_as_the_part_that_is_sent() -> None:
    """The biases of T5 by position, which all later blocks take, lie in parts on tensor ranks."""
    transformers = pytest.importorskip("transformers", reason="not installed", exc_type=ImportError)
    module, batch = make(transformers, "t5")
    schedule = make_schedule("1f1b", ranks=2, microbatches=3)
    cuts = ["decoder.block.0"]

    def rank() -> tuple[int, int, int]:
        with counted() as sent:
            model = Pipeline.from_module(copy.deepcopy(module), schedule, batch, cuts=cuts)
            execute_pipeline(iter([batch]), model)
        assert model.cut is not None
        whole = replace(model.cut, sizes={})
        return sent.activations, model.cut.bytes_between(0, 1), whole.bytes_between(0, 1)

    results = run_threads(rank, 4, tensor=2, deadline=200.0)
    assert [sent for sent, *_ in results] == [3 * planned for _, planned, _ in results[:2]] + [0, 0]
    assert all(planned < whole for _, planned, whole in results)
