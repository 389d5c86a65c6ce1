"""Where a module is cut, what stages receive, send and own, and what is refused."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from pipeflow import UsageError
from pipeflow.core.placement import Placement
from pipeflow.engine.stages.absent import AbsentTensor
from pipeflow.engine.stages.blocks import blocks_of, labels_of
from pipeflow.engine.stages.plan import CutPlan
from pipeflow.engine.stages.planner import Planner
from pipeflow.engine.stages.stage import ModuleStage
from tests.stages.models import CASES, LENGTH, WIDTH, Block, Decoder, Dense, Shared, sentences, vectors

CPU = torch.device("cpu")


def entries_of(planner: Planner, batch: Any) -> dict[str, Any]:
    return planner.entries.of(batch)[0]


def planned(module: nn.Module, batch: Any, stages: int, **options: Any) -> CutPlan:
    planner = Planner(module, stages, **options)
    return planner.plan(entries_of(planner, batch))


def received(plan: CutPlan) -> list[list[str]]:
    return [[plan.trace.calls[value.call].name for value in stage.receives] for stage in plan.stages]


def test_a_language_model_sends_its_hidden_state_and_nothing_else() -> None:
    plan = planned(Decoder(), sentences(3), 4)
    assert received(plan) == [[], ["layers.0"], ["layers.1"], ["layers.2"]]
    assert plan.sent_bytes == (3 * LENGTH * WIDTH * 4,) * 3 + (0,)


def test_a_shared_weight_belongs_to_the_stages_that_use_it_and_an_unused_one_to_the_last() -> None:
    stages = planned(Decoder(), sentences(3), 3).stages
    assert [index for index, stage in enumerate(stages) if "words.weight" in stage.owned] == [0, 2]
    assert [index for index, stage in enumerate(stages) if "unused.weight" in stage.owned] == [2]
    owned = [name for stage in stages for name in stage.owned]
    assert sorted(owned) == sorted([*(name for name, _ in Decoder().named_parameters()), "words.weight"])


def test_a_block_that_is_called_often_belongs_to_all_stages() -> None:
    plan = planned(Shared(), sentences(2), 4)
    assert all("groups.0.up.weight" in stage.owned for stage in plan.stages)
    assert ["start" in stage.owned for stage in plan.stages] == [True, False, False, False]


def taken(plan: CutPlan) -> list[dict[int, list[str]]]:
    """Per stage, what comes from which one."""
    names = [call.name for call in plan.trace.calls]
    takes = [ways.takes for ways in plan.ways]
    return [{source: [names[each.call] for each in values] for source, values in each.items()} for each in takes]


def test_what_all_later_stages_need_is_handed_from_each_to_the_next() -> None:
    plan = planned(Dense().double(), vectors(2), 4)
    assert plan.routes == ()
    assert taken(plan) == [
        {},
        {0: ["blocks.0"]},
        {1: ["blocks.0", "blocks.1"]},
        {2: ["blocks.0", "blocks.1", "blocks.2"]},
    ]
    one = 2 * WIDTH * 8
    assert plan.sent_bytes == (one, 2 * one, 3 * one, 0)


def test_on_a_rank_that_has_it_a_stage_takes_it_from_there() -> None:
    plan = planned(Dense(), vectors(2), 4, placement=Placement.vee(2))
    assert plan.routes == ((0, 3),)
    assert taken(plan)[3] == {2: ["blocks.1", "blocks.2"], 0: ["blocks.0"]}


def test_skips_do_not_pass_through_a_stage_that_has_no_use_for_them() -> None:
    module, (image, _) = CASES["u-net"].module(), CASES["u-net"].batch(2)
    plan = planned(module, (image, None), 5, cuts=["downs.0.0", "downs.1.0", "downs.1.1", "middle"])
    assert received(plan) == [
        [],
        ["downs.0.0"],
        ["downs.1.0"],
        ["downs.1.1"],
        ["downs.0.0", "downs.1.0", "middle"],
    ]
    assert plan.routes == ((1, 4), (2, 4))
    assert taken(plan)[4] == {3: ["middle"], 1: ["downs.0.0"], 2: ["downs.1.0"]}


def test_an_encoder_s_output_and_a_decoder_s_bias_go_to_all_blocks() -> None:
    case = CASES["encoder-decoder"]
    plan = planned(case.module(), case.batch(2), 5)
    assert received(plan) == [
        [],
        ["encoder.block.0"],
        ["encoder.block.1"],
        ["encoder", "decoder.block.0", "decoder.block.0"],
        ["encoder", "decoder.block.1", "decoder.block.1"],
    ]
    assert plan.routes == ()


def test_cuts_by_costs_and_by_names() -> None:
    by_costs = planned(Decoder(), sentences(2), 2, cuts=[5, 1, 1, 1])
    by_name = planned(Decoder(), sentences(2), 2, cuts=["layers.0"])
    assert received(by_costs) == received(by_name) == [[], ["layers.0"]]
    assert received(planned(Shared(), sentences(2), 2, cuts=["groups.0:2"])) == [[], ["groups.0"]]
    within = planned(Decoder(), sentences(2), 2, cuts=["layers.1.down"])
    assert received(within) == [[], ["layers.0", "layers.1.down"]]


def test_blocks_by_class_and_by_name() -> None:
    for blocks in (Block, "Block", ["layers.0", "layers.1", "layers.2", "layers.3"]):
        planner = Planner(Decoder(), 1)
        trace = planner.plan(entries_of(planner, sentences(2))).trace
        assert labels_of(blocks_of(trace, Decoder(), blocks)) == [f"layers.{index}" for index in range(4)]


def test_a_stage_has_no_memory_for_what_it_does_not_own() -> None:
    module = Decoder()
    planner = Planner(module, 4)
    plan = planner.plan(entries_of(planner, sentences(2)))
    stage = ModuleStage(module, 1, planner, plan, CPU)
    assert {name for name, _ in stage.named_parameters()} == plan.stages[1].owned
    assert all(stage.get_parameter(name) is module.get_parameter(name) for name in plan.stages[1].owned)
    ghost = stage.root.get_submodule("words").weight
    assert (ghost.shape, ghost.dtype) == (module.words.weight.shape, torch.float32)
    assert isinstance(ghost, AbsentTensor)
    stage.double()
    ghost = stage.root.get_submodule("words").weight
    assert (type(ghost), ghost.dtype) == (AbsentTensor, torch.float64)
    assert set(stage.state_dict()) == plan.stages[1].owned


def test_a_buffer_is_stored_once() -> None:
    layers = [layer for _ in range(3) for layer in (nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))]
    module = nn.Sequential(*layers)
    planner = Planner(module, 3)
    plan = planner.plan(entries_of(planner, vectors(4)))
    stored = [set(ModuleStage(module, index, planner, plan, CPU).state_dict()) for index in range(3)]
    assert sorted(name for names in stored for name in names) == sorted(module.state_dict())
    assert "3.running_mean" in stored[1]


def test_planning_needs_no_memory_for_parameters_and_leaves_the_module_and_the_batch_alone() -> None:
    with torch.device("meta"):
        huge = nn.Sequential(*(nn.Linear(2**20, 2**20) for _ in range(4)))
    plan = planned(huge, (torch.ones(1, 2**20), None), 2)
    assert plan.sent_bytes == (2**22, 0)
    module, batch = Decoder(), sentences(3)
    state, words = {name: each.clone() for name, each in module.state_dict().items()}, batch["input_ids"].clone()
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    planned(module, batch, 2)
    assert torch.equal(torch.rand(1), expected)
    assert torch.equal(batch["input_ids"], words)
    assert all(torch.equal(state[name], each) for name, each in module.state_dict().items())


class Dropping(Decoder):
    """Leaves layers out at random."""

    probability = 0.5

    def forward(self, input_ids: Tensor, **_: Any) -> Tensor:  # type: ignore[override]  # another model
        hidden: Tensor = self.words(input_ids)
        for layer in self.layers:
            if not self.training or torch.rand([]) >= self.probability:
                hidden = layer(hidden)
        return hidden.sum()


class Early(Decoder):
    """Ends when a hidden state is small."""

    def forward(self, input_ids: Tensor, **_: Any) -> Tensor:  # type: ignore[override]  # another model
        hidden: Tensor = self.words(input_ids)
        for layer in self.layers:
            hidden = layer(hidden)
            if hidden.abs().max() < 1e-3:
                break
        return hidden.sum()


class Noting(nn.Module):
    """Leaves something beside its output."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.noted: Tensor | None = None

    def forward(self, hidden: Tensor, notes: list[Tensor]) -> Tensor:
        inner = self.layer(hidden)
        notes.append(inner * 2)
        output: Tensor = hidden + inner
        return output


class Leaking(nn.Module):
    """Reads at its end what its blocks noted."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Noting() for _ in range(3))

    def forward(self, values: Tensor) -> Tensor:
        notes: list[Tensor] = []
        for block in self.blocks:
            values = block(values, notes)
        total: Tensor = values.sum() + torch.stack(notes).sum()
        return total


class Writing(nn.Module):
    """Its blocks write to a tensor that is no argument."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(InPlace() for _ in range(3))

    def forward(self, values: Tensor) -> Tensor:
        values = values * 1
        for block in self.blocks:
            block.total = values
            block()
        return values.sum()


class Choosing(nn.Module):
    """Leaves blocks out by Python's random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = Encoder()

    def forward(self, values: Tensor) -> Tensor:
        return self.encoder(values).sum()  # type: ignore[no-any-return]


class Encoder(nn.Module):
    """Leaves half of its blocks out."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(8))

    def forward(self, values: Tensor) -> Tensor:
        for block in self.blocks:
            if random.random() < 0.5:
                values = block(values)
        return values


class Named(nn.Module):
    """Has no list of blocks; the module within another has several."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Block()

    def forward(self, values: Tensor) -> Tensor:
        return self.inner(values).sum()  # type: ignore[no-any-return]


class InPlace(nn.Module):
    """Returns nothing."""

    total: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self) -> None:
        self.total.add_(self.layer(self.total * 1))


class Noisy(nn.Module):
    """Adds to every block's input the same random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, values: Tensor) -> Tensor:
        noise = torch.randn_like(values)
        for block in self.blocks:
            values = block(values + noise)
        return values.sum()


class Twice(nn.Module):
    """Needs at its end what two checkpointed blocks made, one of the other's output."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, values: Tensor) -> Tensor:
        values = values.requires_grad_()
        first, second, third = self.blocks
        one = checkpoint(first, values, use_reentrant=True)
        two = checkpoint(second, one, use_reentrant=True)
        total: Tensor = checkpoint(third, one + two, use_reentrant=True).sum()
        return total


REFUSED: dict[str, tuple[nn.Module, Any, int, dict[str, Any], str]] = {
    "few blocks": (Decoder(), sentences(2), 5, {}, "4 blocks cannot fill 5 stages .layers.0, layers.1"),
    "nobody's blocks": (Named(), vectors(2), 2, {}, r"as in blocks=\['inner.norm', 'inner.up', 'inner.down'\]"),
    "layer drop": (Choosing(), vectors(2), 2, {}, "encoder chooses by a random number which modules it calls"),
    "no blocks": (Block(), vectors(2), 2, {}, "no place to cut a Block: its forward calls no children"),
    "wrong costs": (Decoder(), sentences(2), 2, {"cuts": [1.0, 2.0]}, "2 costs for 4 blocks"),
    "a wrong cut": (Decoder(), sentences(2), 2, {"cuts": ["layer.1"]}, "'layer.1', which the forward does not call"),
    "few cuts": (Decoder(), sentences(2), 3, {"cuts": ["layers.1"]}, "3 stages have 2 cuts between them, got 1"),
    "unordered": (Decoder(), sentences(2), 3, {"cuts": ["layers.1", "layers.0"]}, "'layers.0' ends before 'layers.1'"),
    "another word": (Decoder(), sentences(2), 3, {"cuts": "evenly"}, "got 'evenly'"),
    "a wrong class": (Decoder(), sentences(2), 2, {"blocks": "Layer"}, "matches no module that the forward calls"),
    "a wrong block": (Decoder(), sentences(2), 2, {"blocks": ["layer"]}, "'layer', which is no module of the Decoder"),
    "LayerDrop": (Dropping(), sentences(2), 2, {}, "the module chooses by a random number which modules it calls"),
    "early exit": (Early(), sentences(2), 2, {}, "the module's own forward branches on the values of a tensor"),
    "a leak": (Leaking(), vectors(2), 3, {}, "blocks.0 passes a tensor to the module itself outside its output"),
    "writing": (Writing(), vectors(2), 3, {}, "no longer depends on blocks.0.layer.weight"),
    "noise": (Noisy(), vectors(2), 2, {}, "depends on random numbers that the forward draws before blocks.0 ends"),
    "a checkpoint": (Twice(), vectors(2), 3, {}, "blocks.1 lies within a reentrant checkpoint, and both"),
    "another entry": (Decoder(), {"words": torch.ones(2)}, 2, {}, "no parameter 'words', an entry of the batch"),
    "no batch": (Decoder(), torch.ones(2), 2, {}, "a batch must be a dict of the keywords of Decoder.forward"),
    "many inputs": (Block(), ((1, 2, 3), None), 2, {}, "takes 2 arguments, the batch has 3 inputs"),
    "lazy": (nn.Sequential(nn.LazyLinear(3)), vectors(2), 1, {}, "0.weight has no shape yet"),
}


def test_one_stage_needs_no_place_to_cut() -> None:
    [stage] = planned(Block(), vectors(2), 1).stages
    assert sorted(stage.owned) == sorted(name for name, _ in Block().named_parameters())


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature:UserWarning")
@pytest.mark.parametrize("what", REFUSED)
def test_what_is_refused(what: str) -> None:
    module, batch, stages, options, message = REFUSED[what]
    with pytest.raises(UsageError, match=message):
        planned(module, batch, stages, **options)


def test_layers_that_could_be_dropped_but_are_not() -> None:
    module = Dropping()
    module.probability = 0.0
    assert len(planned(module, sentences(2), 4).stages) == 4
    module.probability = 0.5
    assert len(planned(module.eval(), sentences(2), 4).stages) == 4
