"""Logits and their loss, computed by slices of tokens, leave the losses and gradients of logits that are whole."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from pipeflow import CostModel, Pipeline, UsageError, execute_pipeline, make_schedule
from pipeflow.engine.parallel.context import current_context
from pipeflow.engine.runtime.head_logits import Sliced, Slicing
from pipeflow.engine.runtime.weighing import Divisors
from pipeflow.models import GPTLMLoss, build_gpt_pipeline
from pipeflow.testing import run_threads
from pipeflow.testing.ranks import RankError

WORDS, LENGTH, SAMPLES, MICROBATCHES = 37, 9, 8, 4
Stepped = tuple[Any, dict[str, Any], Any, Any]


class Language(nn.Module):
    """A model whose logits are capped."""

    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, 8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.lm_head = nn.Linear(8, WORDS)
        if tied:
            self.lm_head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.embed(ids)
        for block in self.blocks:
            hidden = hidden + block(hidden).tanh()
        return torch.tanh(self.lm_head(hidden) / 3.0) * 3.0

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head


class OwnLoss(Language):
    """Returns its loss, too, as models of transformers do."""

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> Any:
        logits = super().forward(ids)
        if labels is None:
            return {"logits": logits}
        labels = functional.pad(labels, (0, 1), value=-100)[..., 1:].contiguous()
        loss = functional.cross_entropy(logits.view(-1, WORDS), labels.view(-1))
        return {"loss": loss, "logits": logits}


def labelled(seed: int = 0) -> tuple[Tensor, Tensor]:
    """Words and labels: one microbatch has none that counts, and another one a slice without any."""
    ids = torch.randint(0, WORDS, (SAMPLES, LENGTH), generator=torch.Generator().manual_seed(seed))
    labels = ids.clone()
    labels[:2] = labels[4, 2:] = labels[5, :3] = -100
    return ids, labels


def shifted(logits: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def made(own: bool, tied: bool = False) -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = (OwnLoss if own else Language)(tied=tied)
    return model.double()


def stepped(model: Pipeline, batch: Any, *, outputs: bool = False) -> Stepped:
    """Two steps and an evaluation: the loss, the gradients, and the loss and the outputs of the evaluation."""
    for _ in range(2):
        loss = execute_pipeline(iter([batch]), model).loss
    found = execute_pipeline(iter([batch]), model, forward_only=True, return_outputs=outputs)
    return loss, {name: each.grad for name, each in model.named_parameters()}, found.loss, found.outputs


def cut(module: nn.Module, name: str, criterion: Any, slices: int | None, options: dict[str, Any]) -> Stepped:
    ids, labels = labelled()
    batch: Any = {"ids": ids, "labels": labels} if criterion is None else (ids, labels)
    ranks = 1 if name == "1f1b-1" else 2
    if "offload" in options:
        times: dict[str, Any] = dict.fromkeys(["forward", "backward_input", "backward_weight", "offload"], (1.0, 1.0))
        options = {**options, "cost": CostModel(**times)}
    schedule = make_schedule(name.removesuffix("-1"), ranks=ranks, microbatches=MICROBATCHES, **options)
    model = Pipeline.from_module(copy.deepcopy(module), schedule, batch, criterion=criterion, head_slices=slices)
    return stepped(model, batch, outputs=True)


def require_equal(whole: list[Stepped], sliced: list[Stepped], close: float = 1e-12) -> None:
    for one, other in zip(whole, sliced, strict=True):
        for mine, its in ((one[0], other[0]), (one[2], other[2])):
            assert (mine is None) == (its is None)
            assert mine is None or abs(mine - its) <= close * abs(mine)
        assert one[1].keys() == other[1].keys()
        for name, mine in one[1].items():
            its = other[1][name]
            assert (mine is None) == (its is None), name
            assert mine is None or (mine - its).abs().max() <= close * mine.abs().max(), name
        logits = [each[3]["logits"] if isinstance(each[3], dict) else each[3] for each in (one, other)]
        assert (logits[0] is None) == (logits[1] is None)
        assert logits[0] is None or torch.allclose(logits[0], logits[1], rtol=close, atol=close)


@pytest.mark.some(4)
@pytest.mark.parametrize(
    ("name", "own", "tied", "options"),
    [
        ("1f1b-1", True, True, {}),
        ("1f1b", False, True, {}),
        ("zb-h1", True, False, {}),
        ("zb-v", False, False, {}),
        ("1f1b", True, True, {"recompute": True}),
        ("gpipe", False, False, {"recompute": [1]}),
        ("zb-h1", False, False, {"offload": True}),
    ],
)
def test_slices_leave_losses_gradients_and_outputs(name: str, own: bool, tied: bool, options: dict[str, Any]) -> None:
    module, ranks = made(own, tied), 1 if name == "1f1b-1" else 2
    criterion = None if own else shifted
    whole, sliced = (run_threads(cut, ranks, module, name, criterion, slices, options) for slices in (None, 5))
    require_equal(whole, sliced)


def z_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """The mean cross entropy, and the squares of what its softmax is divided by."""
    return shifted(logits, labels) + 1e-2 * logits.logsumexp(-1).square().mean()


def by_hand(logits: Tensor, labels: Tensor) -> Tensor:
    scores = logits.double().log_softmax(dim=-1)
    picked = scores.gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    counts = labels != -100
    return -(picked * counts).sum() / counts.sum()


def masked(logits: Tensor, labels: Tensor) -> Tensor:
    losses = functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view(labels.shape)
    return (losses * (labels != -100)).sum() / (labels != -100).sum()


def summed(logits: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum", label_smoothing=0.1)


def weighted(logits: Tensor, labels: Tensor) -> Tensor:
    classes = torch.arange(1, WORDS + 1, dtype=logits.dtype)
    return functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), classes, label_smoothing=0.1)


def of_entries(logits: Tensor, labels: Tensor) -> Tensor:
    wanted = functional.one_hot(labels.clamp(min=0), WORDS).to(logits.dtype)
    return functional.binary_cross_entropy_with_logits(logits, wanted) + functional.mse_loss(logits, wanted)


def confident(logits: Tensor, labels: Tensor) -> Tensor:
    """Losses that count as much as the model is sure, which has no gradient."""
    losses = functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
    with torch.no_grad():
        sure = logits.softmax(-1).amax(-1).flatten()
    return (losses * sure).sum() / (labels != -100).sum()


def of_unknown(logits: Tensor, labels: Tensor) -> Tensor:
    """Ends with a function of one number per token that has no rule."""
    losses = functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
    return torch.stack([losses, losses]).sum() / (2 * (labels != -100).sum())


@pytest.mark.some(4)
@pytest.mark.parametrize("criterion", [confident, z_loss, by_hand, masked, summed, weighted, of_entries, of_unknown])
def test_slices_leave_any_loss_of_functions_that_act_on_tokens(criterion: Callable[..., Tensor]) -> None:
    module = made(False)
    whole, sliced = (run_threads(cut, 1, module, "1f1b-1", criterion, slices, {}) for slices in (None, 4))
    require_equal(whole, sliced)


def over_tokens(logits: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(logits.softmax(1).flatten(0, 1), labels.flatten())


def of_classes_first(logits: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(logits.transpose(1, 2), labels)


def of_sorted(logits: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(logits.sort(-1).values.flatten(0, 1), labels.flatten())


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        return logits * 1

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # not that of its forward
        return gradient * 2


def of_own_function(logits: Tensor, labels: Tensor) -> Tensor:
    return shifted(Doubled.apply(logits), labels)  # type: ignore[no-untyped-call]  # torch's


@pytest.mark.parametrize(
    ("criterion", "said"),
    [
        (over_tokens, "softmax over dimension 1 is not"),
        (of_classes_first, "transpose of the last dimension is not"),
        (of_sorted, "sort is not"),
        (of_own_function, "a custom autograd.Function is not"),
    ],
)
def test_what_is_not_known_to_act_on_tokens_is_refused(criterion: Callable[..., Tensor], said: str) -> None:
    with pytest.raises(RankError, match=said):
        run_threads(step_of, 1, made(False), 4, {"criterion": criterion, "weigh": len})


class Bare(Language):
    """A model whose logits are what its head returns."""

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.lm_head(self.embed(ids))
        return logits


@pytest.mark.parametrize("criterion", [shifted, confident])
def test_logits_of_one_slice_are_in_memory_at_once_and_computed_once(criterion: Callable[..., Tensor]) -> None:
    rows = list[int]()

    class Head(nn.Linear):
        acts_on_tokens = True

        def forward(self, hidden: Tensor) -> Tensor:
            rows.append(hidden.numel() // 8)
            return super().forward(hidden)

    model = Bare().double()
    model.lm_head = Head(8, WORDS).double()
    run_threads(step_of, 1, model, 4, {"criterion": criterion})
    tried = [8, 0, 4, 4]  # the first tokens together and by slices, after none of them for the dtype of a row
    tokens = SAMPLES * (LENGTH - (criterion is shifted))
    assert rows == [*tried, 0, *[tokens // 4] * 4]


class Uncalled(Language):
    def forward(self, ids: Tensor) -> Tensor:
        return functional.linear(self.embed(ids), self.lm_head.weight)


class Mixing(nn.Module):
    """A head that uses the mean over tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, WORDS)

    def forward(self, hidden: Tensor) -> Tensor:
        found: Tensor = self.linear(hidden - hidden.mean(1, keepdim=True))
        return found


class Normed(Mixing):
    """A head of several layers, all of which act on each token alone."""

    def forward(self, hidden: Tensor) -> Tensor:
        found: Tensor = self.linear(functional.layer_norm(functional.gelu(hidden), (8,)))
        return found


def step_of(model: nn.Module, slices: int | None = 4, options: dict[str, Any] | None = None) -> Stepped:
    """A step, and an evaluation with outputs, of a model that is not cut."""
    schedule = make_schedule("1f1b", ranks=1, microbatches=1)
    made = Pipeline(model, schedule, **{"criterion": shifted, "head_slices": slices, **(options or {})})
    loss = execute_pipeline(iter([labelled()]), made).loss
    return loss, {name: each.grad for name, each in made.named_parameters()}, None, None


def with_head(head: nn.Module, kind: type[Language] = Language) -> Language:
    torch.manual_seed(0)
    model = kind()
    model.lm_head = head  # type: ignore[assignment]  # another one
    return model.double()


def test_a_head_of_several_layers_is_sliced() -> None:
    torch.manual_seed(1)
    model, other = with_head(head := Normed()), with_head(copy.deepcopy(head))
    whole, sliced = run_threads(step_of, 1, model, None), run_threads(step_of, 1, other, 4)
    assert all(each is not None for each in whole[0][1].values())
    require_equal(whole, sliced)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"head_slices": 0}, "whole number of 1 or more, got 0"),
        ({"head_slices": None, "head": "lm_head"}, "pass head_slices=, too"),
        ({"head": "nowhere"}, "has no module 'nowhere': name it"),
        ({"loss_over": "batch"}, 'loss_over="batch" needs the logits'),
        ({"graph": True}, "which graph=True does not record"),
    ],
)
def test_options_that_do_not_fit_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(RankError, match=said):
        run_threads(step_of, 1, made(False), 4, options)


class Counting(nn.Linear):
    acts_on_tokens = True  # which is not so

    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(hidden) + hidden.detach().reshape(-1, 8).sum()


def hooked(head: nn.Linear, *, weight: bool = False) -> nn.Module:
    """A head with a hook, or one whose weight has a hook."""
    if weight:
        model = with_head(head)
        model.lm_head.weight.register_hook(lambda gradient: gradient / 2)
        return model
    head.register_forward_hook(lambda *_: None)
    return with_head(head)


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (lambda: with_head(nn.Linear(8, WORDS), Uncalled), "did not call its head 'lm_head'"),
        (lambda: with_head(Mixing()), "mean over dimension 1 is not"),
        (lambda: with_head(Counting(8, WORDS)), "computes something else for a few tokens"),
        (lambda: hooked(nn.Linear(8, WORDS)), "head 'lm_head' has hooks"),
        (lambda: hooked(nn.Linear(8, WORDS), weight=True), "a weight of the head has hooks"),
        (lambda: nn.Linear(8, WORDS), r"has no get_output_embeddings\(\) that returns its head"),
    ],
)
def test_heads_that_cannot_be_sliced_are_refused(model: Callable[[], nn.Module], said: str) -> None:
    with pytest.raises(RankError, match=said):
        run_threads(step_of, 1, model())


def test_a_loss_has_one_backward() -> None:
    hidden = torch.randn(3, 4, requires_grad=True)
    loss = Sliced.of(Slicing(2), hidden, 1).square().sum()
    loss.backward(retain_graph=True)
    assert hidden.grad is not None
    assert torch.allclose(hidden.grad, 2 * hidden.detach())
    with pytest.raises(UsageError, match="has one backward"):
        loss.backward()


def test_all_ranks_need_the_same_slices() -> None:
    def make() -> None:
        slices = 2 + current_context().pipeline_rank
        schedule = make_schedule("1f1b", ranks=2, microbatches=MICROBATCHES)
        Pipeline.from_module(made(False), schedule, labelled(), criterion=shifted, head_slices=slices)

    with pytest.raises(RankError, match="rank 1 was given another head_slices than rank 0"):
        run_threads(make, 2)


def gpt(name: str, slices: int | None, dtype: torch.dtype, options: dict[str, Any]) -> Stepped:
    schedule = make_schedule(name, ranks=2, microbatches=MICROBATCHES)
    sizes: dict[str, Any] = {
        "hidden_size": 16,
        "num_attention_heads": 2,
        "vocab_size": WORDS,
        "max_position_embeddings": LENGTH,
    }
    stages = build_gpt_pipeline(4, placement=schedule.placement, dtype=dtype, **sizes)
    model = Pipeline(stages, schedule, criterion=GPTLMLoss(), head_slices=slices, **options)
    ids, labels = labelled()
    return stepped(model, ({"input_ids": ids}, labels))


@pytest.mark.some(2)
@pytest.mark.parametrize(
    ("name", "tensor", "options"),
    [
        ("zb-v", 1, {}),
        ("zb-h1", 1, {"gradient_accumulation_fusion": True}),
        ("1f1b", 2, {}),
        ("chimera", 1, {}),
    ],
)
def test_slices_of_a_gpt_leave_its_gradients(name: str, tensor: int, options: dict[str, Any]) -> None:
    whole, sliced = (
        run_threads(gpt, 2 * tensor, name, slices, torch.float64, options, tensor=tensor) for slices in (None, 3)
    )
    require_equal(whole, sliced)


def test_slices_under_autocast_differ_by_its_rounding() -> None:
    options = {"autocast": torch.bfloat16}
    whole, sliced = (run_threads(gpt, 2, "zb-v", slices, torch.float32, options) for slices in (None, 3))
    require_equal(whole, sliced, close=2e-2)


def test_a_sequence_that_is_split_over_tensor_ranks_is_refused() -> None:
    def make() -> None:
        stages = build_gpt_pipeline(1, hidden_size=16, num_attention_heads=2, vocab_size=38, sequence_parallel=True)
        Pipeline(stages, make_schedule("1f1b", ranks=1, microbatches=1), criterion=GPTLMLoss(), head_slices=2)

    with pytest.raises(RankError, match="has sequence_parallel=True"):
        run_threads(make, 2, tensor=2)


def test_terms_of_a_loss_are_scaled_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    scaled = list[bool]()
    weights = Divisors.weights

    def seen(*arguments: Any) -> Any:
        found = weights(*arguments)
        scaled.append(found is not None and found.scaling is not None)
        return found

    monkeypatch.setattr(Divisors, "weights", seen)
    module = made(False)
    whole, sliced = (run_threads(cut, 1, module, "1f1b-1", z_loss, slices, {}) for slices in (None, 4))
    require_equal(whole, sliced)
    assert any(scaled)
