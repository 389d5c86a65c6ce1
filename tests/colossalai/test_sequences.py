"""Sequence parallelism by a policy: sequences are split between layers, and the model trains as it does whole."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipeflow.colossalai.booster import Booster
from pipeflow.colossalai.booster.plugin import HybridParallelPlugin
from pipeflow.colossalai.shardformer import ShardConfig, ShardFormer
from pipeflow.colossalai.shardformer.layer import (
    LayerNorm1D,
    Linear1D_Col,
    Linear1D_Row,
)
from pipeflow.colossalai.shardformer.policies.base_policy import (
    ModulePolicyDescription,
    Policy,
    SubModuleReplacementDescription,
)
from pipeflow.core.errors import UsageError
from pipeflow.tensor import gather_from_sequence_region, scatter_to_sequence_region
from pipeflow.testing import run_threads
from tests.colossalai.boosted import require_as_plain
from tests.colossalai.test_shardformer import WIDTH, Attention, mean_square
from tests.tensor.ranks import normal, seeded

SEEN: list[int] = []  # lengths of the sequences between layers


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention, self.last = nn.LayerNorm(WIDTH), Attention(), nn.LayerNorm(WIDTH)
        self.wide, self.narrow = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        SEEN.append(x.shape[1])
        x = x + self.attention(self.norm(x))
        made: Tensor = x + self.narrow(self.wide(self.last(x)).relu())
        return made


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def in_pieces(self: Any, x: Tensor) -> Tensor:
    """The forward of Layer, between pieces of the sequence."""
    group = self.wide.group
    made = Layer.forward(self, scatter_to_sequence_region(x, group))
    return gather_from_sequence_region(made, group)


class SequencePolicy(Policy):
    def module_policy(self) -> Any:
        mode = {"seq_parallel_mode": self.shard_config.sequence_parallelism_mode}
        column = [*(f"attention.qkv[{index}]" for index in range(3)), "wide"]
        replaced = [SubModuleReplacementDescription(each, Linear1D_Col, mode) for each in column]
        replaced += [SubModuleReplacementDescription(each, Linear1D_Row, mode) for each in ("attention.out", "narrow")]
        split = {"sp_partial_derived": self.shard_config.enable_sequence_parallelism}
        replaced += [SubModuleReplacementDescription(each, LayerNorm1D, split) for each in ("norm", "last")]
        heads = {"attention.heads": 4 // self.shard_config.tensor_parallel_size}
        methods = {"forward": in_pieces} if self.shard_config.enable_sequence_parallelism else None
        return {Layer: ModulePolicyDescription(heads, None, replaced, methods)}


def model() -> Model:
    made: Model = seeded(Model).double()
    for index, layer in enumerate(made.layers):
        weight = layer.get_parameter("norm.weight")
        weight.data = normal(*weight.shape, seed=index)
    return made


def batch() -> dict[str, Tensor]:
    return {"x": torch.randn(4, 6, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))}


@pytest.mark.some(2)
@pytest.mark.slow
@pytest.mark.parametrize("pipeline", [1, 2])
@pytest.mark.parametrize("overlap", [False, True])
def test_a_policy_splits_sequences(pipeline: int, overlap: bool) -> None:
    SEEN.clear()
    options: dict[str, Any] = {
        "tp_size": 2,
        "pp_size": pipeline,
        "num_microbatches": 2,
        "enable_sequence_parallelism": True,
    }
    options |= {"enable_sequence_overlap": overlap, "sequence_parallelism_mode": "split_gather"}
    require_as_plain(model(), batch(), mean_square, options, policy=SequencePolicy)
    assert set(SEEN) == {3, 6}  # pieces, and the plain model's


def test_without_a_booster() -> None:
    plain = model()
    mean_square(plain(**batch()), batch()).backward()

    def rank(splits: bool) -> dict[str, Any]:
        config = ShardConfig(enable_sequence_parallelism=splits)
        made, _ = ShardFormer(config).optimize(copy.deepcopy(plain), SequencePolicy())
        for each in made.parameters():
            each.grad = None
        mean_square(made(**batch()), batch()).backward()
        return {name: each.grad for name, each in made.named_parameters() if "norm" in name}

    for splits in (False, True):
        for gradients in run_threads(rank, 2, splits, tensor=2):
            for name, gradient in gradients.items():
                torch.testing.assert_close(gradient, plain.get_parameter(name).grad)


def test_rules_keep_sequences_whole() -> None:
    config = ShardConfig(enable_tensor_parallelism=False, enable_sequence_parallelism=True)
    assert config.sequence_parallelism_mode == "split_gather"
    with pytest.raises(UsageError, match="enable_sequence_parallelism=True needs a policy: a model's own attention"):
        ShardFormer(config).optimize(model())

    def rank() -> None:
        plugin = HybridParallelPlugin(2, 1, precision="fp32", enable_sequence_parallelism=True)
        with pytest.raises(UsageError, match="enable_sequence_parallelism=True needs a policy"):
            Booster(plugin=plugin).boost(model())

    run_threads(rank, 2, tensor=2)


def test_other_modes() -> None:
    for layer in (Linear1D_Col, Linear1D_Row):
        with pytest.raises(UsageError, match="sequence_parallelism_mode='all_to_all' is not supported"):
            layer.from_native_module(nn.Linear(2, 2), seq_parallel_mode="all_to_all")
