"""ShardFormer: models over tensor ranks without a pipeline, by pipeflow's rules or by a policy of one's own."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipeflow.colossalai.booster import Booster
from pipeflow.colossalai.booster.plugin import HybridParallelPlugin
from pipeflow.colossalai.shardformer import ModelSharder, ShardConfig, ShardFormer
from pipeflow.colossalai.shardformer.layer import Linear1D_Col, Linear1D_Row
from pipeflow.colossalai.shardformer.policies.base_policy import (
    ModulePolicyDescription,
    Policy,
    SubModuleReplacementDescription,
)
from pipeflow.core.errors import PipelineError, UsageError
from pipeflow.engine.parallel.sharding import splits_of
from pipeflow.engine.parallel.transport.protocol import Alone
from pipeflow.testing import run_threads
from pipeflow.testing.ranks import RankError
from tests.colossalai.boosted import TOLERANCE, require_as_plain
from tests.tensor.ranks import seeded

HEADS, WIDTH = 4, 16


class Attention(nn.Module):
    """Of `heads` heads, which are counted by an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = HEADS
        self.qkv = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (each(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for each in self.qkv)
        mixed = nn.functional.scaled_dot_product_attention(query, key, value)
        return self.out(mixed.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]  # a layer's


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention()
        self.wide, self.narrow = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x) * self.scale
        return x + self.act(x)

    def act(self, x: Tensor) -> Tensor:
        return self.narrow(self.wide(x).relu())  # type: ignore[no-any-return]  # a layer's


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def model(seed: int = 0) -> Model:
    made: Model = seeded(Model, seed=seed).double()
    return made


def batch() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {"x": torch.randn(4, 3, WIDTH, dtype=torch.float64, generator=generator)}


def mean_square(outputs: Tensor, inputs: dict[str, Tensor]) -> Tensor:
    return (outputs - inputs["x"].flip(-1)).square().mean()


def same_act(self: Any, x: Tensor) -> Tensor:
    """What `act` is replaced by: it computes the same."""
    hidden: Tensor = self.narrow(self.wide(x).relu())
    return hidden


class OwnPolicy(Policy):
    """All four replacements: of submodules, of an attribute, of a method and of a parameter."""

    calls: list[str]

    def config_sanity_check(self) -> None:
        self.calls = ["check"]

    def preprocess(self) -> nn.Module:
        self.calls.append("preprocess")
        return self.model

    def module_policy(self) -> Any:
        self.calls.append("policy")
        size = self.shard_config.tensor_parallel_size
        column = [
            SubModuleReplacementDescription(f"attention.qkv[{index}]", Linear1D_Col, {"gather_output": False})
            for index in range(3)
        ]
        table: Any = {
            "Layer": ModulePolicyDescription(
                attribute_replacement={"attention.heads": HEADS // size, "attention.nothing": 1},
                param_replacement=[self.replace_scale],
                sub_module_replacement=[
                    *column,
                    SubModuleReplacementDescription("attention.out", Linear1D_Row, {"parallel_input": True}),
                    SubModuleReplacementDescription("no_such_layer", Linear1D_Row, ignore_if_not_exist=True),
                ],
            )
        }
        wide = SubModuleReplacementDescription("wide", Linear1D_Col)
        narrow = [SubModuleReplacementDescription("narrow", Linear1D_Row)]
        self.append_or_create_submodule_replacement(wide, table, "Layer")
        self.append_or_create_submodule_replacement(narrow, table, Layer)
        return self.append_or_create_method_replacement({"act": same_act}, table, Layer)

    def replace_scale(self, module: nn.Module) -> None:
        assert isinstance(module.scale, nn.Parameter)
        module.scale = nn.Parameter(module.scale.detach().clone())

    def postprocess(self) -> nn.Module:
        self.calls.append("postprocess")
        return self.model


def stepped(module: nn.Module) -> Tensor:
    """The loss, after a step of the weights."""
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    mean_square(module(**batch()), batch()).backward()
    optimizer.step()
    return mean_square(module(**batch()), batch()).detach()


@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_policy_of_ones_own(size: int) -> None:
    ready = model()
    expected = stepped(copy.deepcopy(ready))

    def rank() -> tuple[Tensor, int]:
        policy = OwnPolicy()
        made, shared = ShardFormer(ShardConfig()).optimize(copy.deepcopy(ready), policy)
        assert shared == []
        assert policy.calls == ["check", "preprocess", "policy", "postprocess"]
        first: Any = made.layers[0]  # type: ignore[index]  # a list
        assert first.attention.heads == HEADS // size
        assert type(first.attention.qkv[1]) is Linear1D_Col
        assert first.act.__func__ is same_act
        return stepped(made), len(splits_of(made))

    for loss, splits in run_threads(rank, size, tensor=size):
        torch.testing.assert_close(loss, expected, rtol=TOLERANCE, atol=0)
        assert splits == 2 * 10  # of each layer's 13 parameters all but the scale and the biases of rows are split


@pytest.mark.slow
@pytest.mark.parametrize("pipeline", [1, 2])
def test_a_policy_under_a_booster(pipeline: int) -> None:
    options = {"tp_size": 2, "pp_size": pipeline, "num_microbatches": 2}
    require_as_plain(model(), batch(), mean_square, options, policy=OwnPolicy)


def test_a_sharder_alone() -> None:
    ready = model()

    def rank() -> Tensor:
        made = copy.deepcopy(ready)
        assert ModelSharder(made, OwnPolicy(), ShardConfig()).shard() == []
        return stepped(made)

    expected = stepped(copy.deepcopy(ready))
    for loss in run_threads(rank, 2, tensor=2):
        torch.testing.assert_close(loss, expected, rtol=TOLERANCE, atol=0)


def test_what_stands_in_two_places_is_replaced_by_one() -> None:
    made = model()
    made.layers[1].wide = made.layers[0].wide
    ModelSharder(made, OwnPolicy(), ShardConfig(enable_tensor_parallelism=False)).shard()
    assert made.layers[0].wide is made.layers[1].wide
    assert type(made.layers[0].wide) is Linear1D_Col


@pytest.mark.parametrize(
    ("table", "said"),
    [
        (
            {"Layr": ModulePolicyDescription()},
            "WrongPolicy is for modules of Layr, but Model only has modules of Att",
        ),
        (
            {
                "Layer": ModulePolicyDescription(
                    attribute_replacement={"attention.heads": 1},
                    sub_module_replacement=[SubModuleReplacementDescription("attention.qkv[3]", Linear1D_Col)],
                )
            },
            r"suffix 'attention.qkv\[3\]' of the policy is not a submodule of Layer, which has attention,",
        ),
    ],
    ids=["class", "suffix"],
)
def test_a_policy_that_fits_nothing_changes_nothing(table: Any, said: str) -> None:
    class WrongPolicy(Policy):
        def module_policy(self) -> Any:
            return table

    made = model()
    with pytest.raises(UsageError, match=said):
        ModelSharder(made, WrongPolicy(), ShardConfig(enable_tensor_parallelism=False)).shard()
    assert made.layers[0].attention.heads == HEADS  # type: ignore[union-attr]  # a Layer


def test_a_policy_needs_a_table() -> None:
    with pytest.raises(NotImplementedError, match="Policy needs a module_policy"):
        Policy().module_policy()
    assert Policy().get_held_layers() == []
    assert Policy().get_shared_params() == []


class HeldPolicy(OwnPolicy):
    """One that says which layers each rank holds: as many as the manager of stages deals to it, or other ones."""

    held: list[list[int]] | None = None
    shared: Any = ()

    def get_held_layers(self) -> list[nn.Module]:
        layers: Any = self.model.layers
        manager = self.pipeline_stage_manager
        if self.held is not None:
            return [layers[index] for index in self.held[manager.stage]]
        start, end = manager.get_stage_index(manager.distribute_layers(len(layers)))
        return list(layers[start:end])

    def get_shared_params(self) -> Any:
        return self.shared


def three_layers() -> Model:
    made = model()
    made.layers.append(Layer().double())
    return made


def layers_here(policy: Policy, options: dict[str, Any]) -> list[int]:
    plugin = HybridParallelPlugin(1, 2, num_microbatches=2, precision="fp32", custom_policy=policy, **options)
    boosted, *_ = Booster(plugin=plugin).boost(three_layers())
    boosted.prepare(batch())
    return sorted({int(name.split(".")[1]) for name, _ in boosted.named_parameters()})


def held(layers: list[list[int]] | None = None, shared: Any = (), **options: Any) -> list[list[int]]:
    def rank() -> list[int]:
        policy = HeldPolicy()
        policy.held, policy.shared = layers, shared
        return layers_here(policy, options)

    return run_threads(rank, 2)


def test_stages_have_the_layers_that_the_policy_holds() -> None:
    assert held([[0], [1, 2]]) == [[0], [1, 2]]
    assert held([[0, 1], [2]]) == [[0, 1], [2]]
    assert held() == [[0], [1, 2]]  # the remainder goes to the stage behind the middle
    assert held(num_layers_per_stage=[2, 1]) == [[0, 1], [2]]
    assert held([[], []], num_layers_per_stage=[2, 1]) == [[0, 1], [2]]


@pytest.mark.parametrize(
    ("layers", "said"),
    [
        ([[0], [2]], r"layers\.1 is held by no rank: get_held_layers must return each block on one rank"),
        ([[0, 1], [1, 2]], r"layers\.1 is held by ranks 0, 1"),
        ([[0, 2], [1]], r"gives stages to the ranks \[0, 1, 0\], but they belong to \[0, 1\]"),
        ([[1, 2], [0]], r"gives stages to the ranks \[1, 0\], but they belong to \[0, 1\]"),
    ],
    ids=["none", "both", "split", "order"],
)
def test_held_layers_that_make_no_stages(layers: list[list[int]], said: str) -> None:
    with pytest.raises(RankError, match=said):
        held(layers)


def test_all_ranks_raise_the_error_of_a_policy() -> None:
    def rank() -> None:
        policy = HeldPolicy()
        policy.held = [[0, 1, 2]]  # which has no list for the other rank
        with pytest.raises(PipelineError, match="rank 1 failed: IndexError"):
            layers_here(policy, {})
        policy.held = [[0], [1, 2]]
        layers_here(policy, {})

    run_threads(rank, 2)


def test_shared_parameters_are_asked_for() -> None:
    one, other = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    assert held([[0], [1, 2]], [{0: one, 1: one}]) == [[0], [1, 2]]
    with pytest.raises(RankError, match="get_shared_params has different parameters: make them one in the module"):
        held([[0], [1, 2]], [{0: one, 1: other}])
    policy = HeldPolicy()
    policy.shared = [{0: one}]
    config = ShardConfig(enable_tensor_parallelism=False)
    assert ShardFormer(config).optimize(model(), policy)[1] == [{0: one}]
    assert ModelSharder(model(), policy, config).shard() == [{0: one}]


def stage_managers(options: dict[str, Any]) -> Any:
    plugin = HybridParallelPlugin(1, 2, num_microbatches=2, precision="fp32", **options)
    manager = plugin.stage_manager
    layers = manager.distribute_layers(10)
    with pytest.raises(UsageError, match="num_layers_per_stage is for 4 layers, not 5"):
        HybridParallelPlugin(
            1, 2, num_microbatches=1, precision="fp32", num_layers_per_stage=[2, 2]
        ).stage_manager.distribute_layers(5)
    return layers, [manager.get_stage_index(layers, rank) for rank in range(2)], manager.num_model_chunks


def test_layers_are_dealt_to_stages() -> None:
    interleaved = {"pp_style": "interleaved", "num_model_chunks": 3}
    assert run_threads(stage_managers, 2, {})[0] == ([5, 5], [(0, 5), (5, 10)], 1)
    assert run_threads(stage_managers, 2, interleaved)[0] == (
        [1, 2, 2, 2, 2, 1],
        [[(0, 1), (3, 5), (7, 9)], [(1, 3), (5, 7), (9, 10)]],
        3,
    )
    assert run_threads(stage_managers, 2, {"pp_style": "zbv"})[0] == (
        [2, 3, 3, 2],
        [[(0, 2), (8, 10)], [(2, 5), (5, 8)]],
        2,
    )


@pytest.mark.exhaustive
def test_a_policy_does_not_replace_what_stages_share() -> None:
    class Tied(OwnPolicy):
        """Replaces a layer that the first and the last stage have."""

    def rank() -> None:
        made = model()
        made.layers[1].wide = made.layers[0].wide
        plugin = HybridParallelPlugin(2, 2, num_microbatches=2, precision="fp32", custom_policy=Tied())
        booster = Booster(plugin=plugin)
        boosted, optimizer, *_ = booster.boost(made, torch.optim.SGD(made.parameters(), lr=0.1))
        with pytest.raises(UsageError, match=r"the policy replaces layers.0.wide.weight, which several stages share"):
            booster.execute_pipeline(iter([batch()]), boosted, mean_square, optimizer)

    run_threads(rank, 4, tensor=2)


def test_layers_take_a_group_by_either_name() -> None:
    linear = nn.Linear(4, 4)
    assert (
        Linear1D_Row.from_native_module(linear, process_group=Alone(), parallel_input=False).input_is_parallel is False
    )
    assert Linear1D_Col.from_native_module(linear, Alone()).group.size == 1


def test_a_config_refuses() -> None:
    with pytest.raises(UsageError, match="unknown option of ShardConfig 'enable_tensor_paralelism'; did you mean"):
        ShardConfig(enable_tensor_paralelism=True)
    for option in ({"enable_sequence_overlap": True}, {"sequence_parallelism_mode": "split_gather"}):
        with pytest.raises(UsageError, match="need enable_sequence_parallelism=True"):
            ShardConfig(**option)
    for mode, said in (("ring_attn", "is not supported: it splits the context"), ("rings", "must be 'split_gather'")):
        with pytest.raises(UsageError, match=said):
            ShardConfig(enable_sequence_parallelism=True, sequence_parallelism_mode=mode)
    with pytest.raises(UsageError, match="for a pipeline use Booster"):
        ShardConfig(pipeline_stage_manager=object())
    config = ShardConfig(enable_all_optimization=True, enable_sequence_parallelism=False, extra_kwargs={})
    assert config.enable_fused_normalization
    assert not config.enable_sequence_parallelism
    assert config.tensor_parallel_size == ShardConfig(enable_tensor_parallelism=False).tensor_parallel_size == 1


def is_compiled(module: nn.Module) -> list[bool]:
    return [each._compiled_call_impl is not None for each in module.modules() if isinstance(each, Layer)]


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_blocks_are_compiled() -> None:
    """When they are next called, which another test does."""
    config = ShardConfig(enable_tensor_parallelism=False, enable_jit_fused=True)
    assert is_compiled(ShardFormer(config).optimize(model())[0]) == [True, True]

    def rank() -> list[bool]:
        booster = Booster(
            plugin=HybridParallelPlugin(1, 2, num_microbatches=2, precision="fp32", enable_jit_fused=True)
        )
        boosted, *_ = booster.boost(model())
        boosted.prepare(batch())
        return is_compiled(boosted.pipeline.chunks)

    assert all(all(each) for each in run_threads(rank, 2))


@pytest.mark.exhaustive
@pytest.mark.parametrize("tensor", [1, 2])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
def test_compiled_blocks_train(tensor: int) -> None:
    options = {"tp_size": tensor, "pp_size": 2, "num_microbatches": 2, "enable_jit_fused": True}
    require_as_plain(model(), batch(), mean_square, options, policy=OwnPolicy if tensor > 1 else None, deadline=900.0)


def test_attention_of_other_models_cannot_be_chosen() -> None:
    config = ShardConfig(enable_tensor_parallelism=False, enable_flash_attention=True)
    with pytest.raises(UsageError, match="enable_flash_attention: the attention of Model cannot be changed"):
        ShardFormer(config).optimize(model())
    ShardFormer(ShardConfig(enable_tensor_parallelism=False, enable_all_optimization=True)).optimize(model())
