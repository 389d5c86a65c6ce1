"""Plans of any module: what is counted in one forward on fake tensors, against sizes, real runs and from_module."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed._tools.mem_tracker import MemTracker

from pipeflow import GPT, PRECISIONS, Cluster, Setup, UsageError, make_schedule, plan, plan_module
from pipeflow.planning.pricing.module_plan import ModulePlan
from pipeflow.planning.work import layer_work

A100 = Cluster.of("a100-80gb")
FLOAT32 = Setup(precision=PRECISIONS["float32"])
TWO = make_schedule("1f1b", ranks=2, microbatches=4)


class Block(nn.Module):
    """A transformer layer with fused attention and no dropout."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleDict({name: nn.LayerNorm(hidden) for name in ("attention", "mlp")})
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.wide, self.narrow = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (
            each.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for each in self.qkv(self.norms["attention"](x)).chunk(3, -1)
        )
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        made: Tensor = x + self.narrow(nn.functional.gelu(self.wide(self.norms["mlp"](x))))
        return made


class Decoder(nn.Module):
    """A plain GPT without a position table."""

    def __init__(self, layers: int, hidden: int, heads: int, words: int) -> None:
        super().__init__()
        self.words = nn.Embedding(words, hidden)
        self.layers = nn.ModuleList([Block(hidden, heads) for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm(hidden), nn.Linear(hidden, words, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        for layer in self.layers:
            x = layer(x)
        made: Tensor = self.head(self.norm(x))
        return made


class UNet(nn.Module):
    """Convolutions with a skip connection."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = nn.ModuleList(
            [
                nn.Conv2d(3, 8, 3, padding=1),
                nn.Conv2d(8, 16, 3, stride=2, padding=1, groups=2),
                nn.ConvTranspose2d(16, 8, 2, stride=2),
                nn.Conv2d(16, 2, 1),
            ]
        )

    def forward(self, x: Tensor) -> Tensor:
        first = self.steps[0](x).relu()
        inner = self.steps[1](first).relu()
        made: Tensor = self.steps[3](torch.cat([first, self.steps[2](inner)], 1))
        return made


def decoder() -> tuple[Decoder, GPT]:
    with torch.device("meta"):
        module = Decoder(4, 256, 4, 1000)
    return module, GPT(4, 256, 4, 128, 1000, position_table=False, tied=False, dropout=False)


def planned(module: nn.Module, given: Tensor, setup: Setup | None = None, **options: Any) -> ModulePlan:
    return plan_module(module, TWO, (given, None), setup, cluster=A100, **options)


def ids(rows: int = 2, length: int = 128) -> Tensor:
    return torch.zeros(rows, length, dtype=torch.long)


def saved_in(module: nn.Module, given: Tensor) -> int:
    """The bytes that a real forward saves, each storage once and no parameters."""
    own = {each.untyped_storage().data_ptr() for each in module.parameters()}
    kept: dict[int, Tensor] = {}

    def save(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
        output = module(given)
    assert output.requires_grad
    return sum(tensor.untyped_storage().nbytes() for key, tensor in kept.items() if key not in own)


def test_products_attention_and_parameters_are_those_of_the_sizes() -> None:
    module, sizes = decoder()
    found = planned(module, ids())
    work = layer_work(sizes, Setup(microbatch_size=2))
    for piece in found.pieces[1:-1]:
        assert sum(each.flops for each in piece.work.products) == sum(each.flops for each in work.products)
        assert piece.work.attention_flops == work.attention_flops
        assert piece.work.moved_bytes == pytest.approx(work.moved_bytes, rel=0.3)  # the sizes count dropouts
    assert sum(each.flops for each in found.pieces[-1].work.products) == 2 * 128 * sizes.head_flops
    assert found.parameters_total == sizes.parameters
    assert [rank.parameters for rank in found.ranks] == [
        rank.parameters for rank in plan(sizes, TWO, cluster=A100).ranks
    ]


def test_the_step_and_its_memory_are_near_those_of_the_sizes() -> None:
    with torch.device("meta"):
        module = Decoder(4, 2048, 16, 1000)
    sizes = GPT(4, 2048, 16, 2048, 1000, position_table=False, tied=False, dropout=False)
    mine, its = planned(module, ids(4, 2048)), plan(sizes, TWO, Setup(microbatch_size=4), cluster=A100)
    assert mine.step_seconds == pytest.approx(its.step_seconds, rel=0.05)
    assert mine.peak_bytes == pytest.approx(its.peak_bytes, rel=0.05)
    assert mine.cost.deferred_bytes == pytest.approx(its.cost.deferred_bytes, rel=0.05)
    assert mine.cost.activation_bytes[0] == its.cost.activation_bytes[0]


def test_gradients_that_come_and_go_with_an_engine_are_planned_for_modules_too() -> None:
    module, _ = decoder()
    setup = Setup(data=2, zero=3, engine="torchtitan")
    found = planned(module, ids(), setup=setup)
    assert all(rank.gradient_bytes > 0 and rank.weight_bytes == 0 for rank in found.ranks)


def test_convolutions_count_as_the_products_that_they_are() -> None:
    found = planned(UNet(), torch.zeros(2, 3, 16, 16))
    flops = [sum(each.flops for each in piece.work.products) for piece in found.pieces]
    one = 2 * 2 * 16 * 16 * 8 * 27
    two = 2 * 2 * 8 * 8 * 16 * 4 * 9
    three = 2 * 2 * 8 * 8 * 16 * 8 * 4
    four = 2 * 2 * 16 * 16 * 2 * 16
    assert flops == [0, one, two, three, four, 0]


@pytest.mark.parametrize("name", ["decoder", "unet"])
def test_saved_bytes_are_those_of_a_real_run(name: str) -> None:
    module, given = (Decoder(2, 64, 4, 100), ids(2, 16)) if name == "decoder" else (UNet(), torch.zeros(2, 3, 16, 16))
    found = plan_module(module, make_schedule("1f1b", ranks=1, microbatches=1), (given, None), FLOAT32, cluster=A100)
    assert found.cost.saved_bytes[0] == pytest.approx(saved_in(module, given), rel=0.01)


class WithLoss(nn.Module):
    """A decoder that returns its own loss."""

    def __init__(self, words: int) -> None:
        super().__init__()
        self.decoder = Decoder(2, 64, 4, words)

    def forward(self, ids: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.decoder(ids).flatten(0, 1), ids.flatten())


@pytest.mark.parametrize("words", [100, 2000])
def test_the_peak_of_a_backward_is_that_of_a_real_run(words: int) -> None:
    """It is in the loss if there are many words, else in a layer."""
    module, given = WithLoss(words), ids(2, 64)
    one = make_schedule("1f1b", ranks=1, microbatches=1)
    [rank] = plan_module(module, one, (given, None), FLOAT32, cluster=A100).ranks
    tracker = MemTracker()
    tracker.track_external(module)
    with tracker:
        module(given).backward()
    [peak] = tracker.get_tracker_snapshot("peak").values()
    real = sum(size for kind, size in peak.items() if str(kind) in ("_MemRefType.ACT", "_MemRefType.TEMP"))
    assert rank.activation_bytes + rank.backward_bytes == pytest.approx(real, rel=0.03)


def test_full_checkpoints_keep_inputs_alone_and_compute_again() -> None:
    module, _ = decoder()
    none, full = (planned(module, ids(), Setup(checkpoint=kept)) for kept in ("none", "full"))
    hidden = 2 * 2 * 128 * 256
    assert full.cost.saved_bytes[0] == pytest.approx(2 * hidden, rel=0.05)
    assert full.ranks[0].recomputed_bytes == pytest.approx((none.cost.saved_bytes[0]) / 2, rel=0.2)
    assert full.cost.backward_input[0] > none.cost.backward_input[0]
    assert full.cost.forward == none.cost.forward


def test_cuts_balance_the_head_and_can_be_given() -> None:
    with torch.device("meta"):
        module = Decoder(4, 1024, 4, 200_000)
    assert planned(module, ids(8)).cuts == ("layers.2",)
    assert planned(module, ids(8), cuts="uniform").cuts == ("layers.1",)
    given = planned(module, ids(8), cuts=["layers.0"])
    assert given.cuts == ("layers.0",)
    assert [rank.parts for rank in given.ranks] == [((0, 1),), ((1, 4),)]


def test_the_module_stays_as_it_is_and_needs_no_memory() -> None:
    with torch.device("meta"):
        module = Decoder(2, 32_768, 64, 1000)  # 100 GB in float32
    before = [id(each) for each in module.parameters()]
    found = planned(module, torch.zeros(1, 128, dtype=torch.long, device="meta"))
    assert [id(each) for each in module.parameters()] == before
    assert all(each.is_meta and each.dtype is torch.float32 for each in module.parameters())
    assert found.ranks[0].weight_bytes > 2**34


def test_a_table_on_two_ranks_is_held_twice_and_summed() -> None:
    module, _ = decoder()
    module.head.weight = module.words.weight
    found = planned(module, ids())
    assert found.step_parts is not None
    assert found.step_parts.reduction > 0
    assert sum(rank.parameters for rank in found.ranks) == found.parameters_total + 1000 * 256


def test_gpt2_of_transformers_counts_like_its_sizes() -> None:
    transformers = pytest.importorskip("transformers")
    with torch.device("meta"):
        module = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=2))
    found = plan_module(module, TWO, {"input_ids": ids(), "labels": ids()}, cluster=A100)
    work = layer_work(GPT(2, 768, 12, 128, 50257), Setup(microbatch_size=2))
    assert sum(each.flops for each in found.pieces[1].work.products) == sum(each.flops for each in work.products)
    assert found.pieces[1].work.attention_flops == pytest.approx(work.attention_flops)
    assert found.parameters_total == sum(each.numel() for each in module.parameters())


@pytest.mark.parametrize(
    ("setup", "text"),
    [
        (Setup(tensor=2), "tensor=1"),
        (Setup(checkpoint="selective"), "'none' or 'full'"),
        (Setup(microbatch_size=2), "leave out microbatch_size"),
    ],
)
def test_a_setup_that_cannot_be_planned_is_refused(setup: Setup, text: str) -> None:
    with pytest.raises(UsageError, match=text):
        planned(decoder()[0], ids(), setup)


def test_an_example_that_is_no_batch_and_a_module_without_blocks_are_refused() -> None:
    with pytest.raises(UsageError, match="a batch must be a dict"):
        plan_module(decoder()[0], TWO, None, cluster=A100)
    with pytest.raises(UsageError, match="no place to cut"):
        planned(nn.Linear(2, 2), torch.zeros(2, 2))
    with pytest.raises(UsageError, match="cannot fill"):
        planned(nn.Sequential(nn.Linear(2, 2)), torch.zeros(2, 2))


class Branching(nn.Module):
    """Calls a number of blocks that depends on what it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(2, 2) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
            if x.sum() > 0:
                break
        return x


def test_a_forward_that_depends_on_what_it_computes_is_refused() -> None:
    with pytest.raises(UsageError, match="branches on the values"):
        planned(Branching(), torch.zeros(2, 2))
