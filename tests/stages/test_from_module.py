"""Pipelines of whole modules: batches of all forms and shapes, names, checkpoints, and what else Pipelines promise."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from pipeflow import (
    CostModel,
    Pipeline,
    PipelineError,
    UsageError,
    execute_pipeline,
    load_checkpoint,
    make_schedule,
    save_checkpoint,
)
from pipeflow.engine.parallel.context import current_context
from pipeflow.testing import run_processes, run_threads
from tests.stages.models import CASES, LENGTH, WIDTH, WORDS, Decoder, masked_sentences, seeded, sentences, vectors

TWO = make_schedule("1f1b", ranks=2, microbatches=2)
FOUR = make_schedule("gpipe", ranks=4, microbatches=2)
DECODER = CASES["decoder"]
Named = dict[str, Tensor]


def gradients_of(module: nn.Module) -> Named:
    return {name: each.grad for name, each in module.named_parameters() if each.grad is not None}


def plain(batches: list[Any], module: nn.Module | None = None) -> tuple[list[float], Named]:
    """The losses of batches, and the sum of their gradients, without a pipeline."""
    module = DECODER.module() if module is None else module
    losses = [DECODER.plain_loss(module, batch) for batch in batches]
    torch.stack(losses).sum().backward()
    return [loss.item() for loss in losses], gradients_of(module)


def require_near(found: Named, expected: Named) -> None:
    for name, gradient in found.items():
        assert (gradient - expected[name]).abs().max() <= 1e-9 * expected[name].abs().max(), name


def test_other_shapes_are_planned_when_they_come() -> None:
    """Another length, a last microbatch with fewer samples, an entry less, evaluation; and nothing is planned twice."""
    short = sentences(3, length=LENGTH - 2)
    seen = {**masked_sentences(5), "attention_mask": torch.ones(5, LENGTH).long()}  # the forward branches on it
    batches = [masked_sentences(5), short, seen, short, sentences(4)]

    def rank() -> tuple[list[float | None], Named, int, object]:
        model = Pipeline.from_module(DECODER.module(), TWO, batches[0])
        found = [execute_pipeline(iter([batch]), model, broadcast_loss=True).loss for batch in batches]
        chunk: Any = model.chunks[0]
        plans = len(chunk._planner._plans)
        model.eval()
        words = {"input_ids": short["input_ids"]}
        outputs = execute_pipeline(iter([words]), model, forward_only=True, return_outputs=True).outputs
        return [None if loss is None else loss.item() for loss in found], gradients_of(model), plans, outputs

    losses, expected = plain(batches)
    results = run_threads(rank, 2)
    for found, gradients, plans, _ in results:
        assert found == pytest.approx(losses, rel=1e-9)
        require_near(gradients, expected)
        assert plans == 5  # of 3 and 2 samples with a mask, of 2 and 1 short ones, and of 2 without a mask
    outputs = results[1][3]
    with torch.no_grad():
        assert torch.allclose(outputs.logits, DECODER.module()(short["input_ids"]).logits, rtol=1e-9)


def test_batches_of_every_form() -> None:
    """A dict of keywords, a pair of such a dict and labels, of the first argument and labels, of all arguments."""
    batch = masked_sentences(4)
    words, mask, labels = batch["input_ids"], batch["attention_mask"], batch["labels"]
    forms = [
        batch,
        ({"input_ids": words, "attention_mask": mask}, labels),
        ((words, mask), labels),
        ((words, mask, labels), None),
    ]

    def rank() -> list[float]:
        model = Pipeline.from_module(DECODER.module(), TWO, forms[0], weigh=lambda labels: 1)
        steps = [execute_pipeline(iter([form]), model, broadcast_loss=True) for form in forms]
        return [step.loss.item() for step in steps if step.loss is not None]

    for losses in run_threads(rank, 2):
        assert len(losses) == 4
        assert losses == pytest.approx([losses[0]] * 4, rel=1e-12)


class Forms(nn.Module):
    """Takes arguments by position alone, any number, and by name."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, values: Tensor, /, *others: Tensor, scale: float = 1.0) -> Tensor:
        for block, other in zip(self.blocks, others, strict=True):
            values = torch.tanh(block(values) + other) * scale
        return values


def test_arguments_by_position() -> None:
    values, target = vectors(4)
    module = seeded(Forms().double(), 0)
    expected = functional.mse_loss(module(values, values, -values), target).item()

    def rank() -> float | None:
        batch = (values, values, -values), target
        model = Pipeline.from_module(seeded(Forms().double(), 0), TWO, batch, criterion=functional.mse_loss)
        loss = execute_pipeline(iter([batch]), model, broadcast_loss=True).loss
        return None if loss is None else loss.item()

    assert run_threads(rank, 2) == pytest.approx([expected] * 2, rel=1e-12)


def test_frozen_parameters_have_no_gradient_and_the_others_theirs() -> None:
    def frozen() -> nn.Module:
        module = DECODER.module()
        for name, parameter in module.named_parameters():
            parameter.requires_grad_("down" in name)
        return module

    batch = masked_sentences(4)

    def rank() -> tuple[set[str], Named]:
        model = Pipeline.from_module(frozen(), TWO, batch)
        execute_pipeline(iter([batch]), model)
        return {name for name, _ in model.named_parameters()}, gradients_of(model)

    results = run_threads(rank, 2)
    _, expected = plain([batch], frozen())
    assert set().union(*(gradients for _, gradients in results)) == set(expected)
    assert set().union(*(names for names, _ in results)) == {name for name, _ in DECODER.module().named_parameters()}
    for _, gradients in results:
        require_near(gradients, expected)


def test_the_whole_modules_state_dict_is_loaded_and_its_own_has_the_modules_names() -> None:
    batch, whole = masked_sentences(4), seeded(Decoder().double(), 1)

    def load() -> Named:
        model = Pipeline.from_module(DECODER.module(), FOUR, batch)
        model.load_state_dict(whole.state_dict())
        with pytest.raises(RuntimeError, match="Missing key"):
            model.load_state_dict({})
        with pytest.raises(RuntimeError, match=r'Unexpected key\(s\) in state_dict: "strange"'):
            model.load_state_dict(whole.state_dict() | {"strange": torch.zeros(1)})
        return {name: each.detach().clone() for name, each in model.state_dict().items()}

    loaded, expected = run_threads(load, 4), whole.state_dict()
    assert set().union(*loaded) == set(expected)
    assert all(torch.equal(each, expected[name]) for named in loaded for name, each in named.items())


class Versioned(nn.Module):
    """A layer whose states had twice the weight before its version 3, and no counter."""

    _version = 3

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH, dtype=torch.float64))
        self.register_buffer("counter", torch.zeros(()))

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden * self.weight

    def _load_from_state_dict(self, state: Any, prefix: str, metadata: Any, *others: Any) -> None:
        if metadata.get("version", 0) < 3:
            if f"{prefix}weight" in state:
                state[f"{prefix}weight"] = state[f"{prefix}weight"] / 2
            state.setdefault(f"{prefix}counter", torch.zeros(()))
        super()._load_from_state_dict(state, prefix, metadata, *others)


@pytest.mark.parametrize("versioned", [True, False])
def test_modules_know_the_version_of_a_state_dict(versioned: bool) -> None:
    """Those of other stages, whose entries are left out, add none; a dict without versions is of an old one."""

    def build() -> nn.Module:
        layers = [nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), Versioned(), nn.Linear(WIDTH, WIDTH), Versioned()]
        return nn.Sequential(*layers).double()

    def load() -> list[float]:
        model = Pipeline.from_module(build(), TWO, vectors(4), criterion=nn.MSELoss())
        state = build().state_dict()
        with pytest.raises(RuntimeError, match=r'Unexpected key\(s\) in state_dict: "chunks.0.1.strange"'):
            model.load_state_dict(state | {"chunks.0.1.strange": torch.zeros(1)})
        model.load_state_dict(state if versioned else dict(state))
        return [
            layer.weight.mean().item()
            for layer in model.modules()
            if isinstance(layer, Versioned) and layer._parameters.get("weight") is not None
        ]

    assert [scale for found in run_threads(load, 2) for scale in found] == [1.0 if versioned else 0.5] * 2


def test_names_with_the_chunk_before_them_still_load() -> None:
    batch = masked_sentences(4)

    def load() -> bool:
        model = Pipeline.from_module(DECODER.module(), TWO, batch)
        values = {name: torch.full_like(each, 0.5) for name, each in model.chunks[0].state_dict().items()}
        model.load_state_dict({f"chunks.0.{name}": each for name, each in values.items()})
        return all(bool((each == 0.5).all()) for each in model.state_dict().values())

    assert run_threads(load, 2) == [True, True]


def test_a_whole_weight_is_not_loaded_into_a_part() -> None:
    attention = pytest.importorskip("transformers").GPT2Config(n_layer=2, n_embd=8, n_head=2, vocab_size=16)
    from transformers import GPT2LMHeadModel

    def load() -> None:
        module = GPT2LMHeadModel(attention)
        whole = {name: each.clone() for name, each in module.state_dict().items()}
        example = {"input_ids": torch.zeros(4, 4, dtype=torch.long), "labels": torch.zeros(4, 4, dtype=torch.long)}
        model = Pipeline.from_module(module, TWO, example)
        with pytest.raises(UsageError, match=r"is split over the tensor ranks, .* use load_safetensors"):
            model.load_state_dict(whole)

    run_threads(load, 4, tensor=2)


def test_a_ranks_state_dict_says_once_that_it_is_a_part(caplog: pytest.LogCaptureFixture) -> None:
    def ask() -> None:
        model = Pipeline.from_module(DECODER.module(), TWO, masked_sentences(4))
        model.state_dict()
        model.state_dict()

    run_threads(ask, 2)
    said = [each.message for each in caplog.records if "save_checkpoint saves those of all ranks" in each.message]
    assert len(said) == 2


def test_a_checkpoint_has_the_module_s_names_and_fits_any_cut(tmp_path: Path) -> None:
    batch = masked_sentences(4)

    def save() -> None:
        model = Pipeline.from_module(DECODER.module(), TWO, batch)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        execute_pipeline(iter([batch]), model)
        optimizer.step()
        save_checkpoint(tmp_path / "saved", model, optimizer)

    def load() -> Named:
        model = Pipeline.from_module(seeded(Decoder().double(), 1), FOUR, batch, cuts=[1, 1, 3, 1])
        load_checkpoint(tmp_path / "saved", model, torch.optim.Adam(model.parameters()))
        return {name: each.detach().clone() for name, each in model.named_parameters()}

    run_threads(save, 2)
    module = DECODER.module()
    optimizer = torch.optim.Adam(module.parameters(), lr=0.1)
    DECODER.plain_loss(module, batch).backward()
    optimizer.step()
    loaded = run_threads(load, 4)
    for named in loaded:
        assert all(torch.allclose(each, module.get_parameter(name), rtol=1e-6) for name, each in named.items())
    assert set().union(*loaded) == {name for name, _ in module.named_parameters()}


class Scaled(nn.Module):
    """Scales by the same buffer after every block."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.scale: Tensor
        self.register_buffer("scale", torch.ones(WIDTH, dtype=torch.float64))

    def forward(self, values: Tensor) -> Tensor:
        for block in self.blocks:
            values = torch.tanh(block(values)) * self.scale
        return values.sum()


@pytest.mark.some(1)
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved-1f1b", "zb-v"])
def test_a_buffer_that_several_stages_use_is_loaded_by_all(schedule: str, tmp_path: Path) -> None:
    batch = vectors(4)[0], None

    def made(scale: float) -> Pipeline:
        module = Scaled()
        module.double().get_buffer("scale").fill_(scale)
        return Pipeline.from_module(module, make_schedule(schedule, ranks=2, microbatches=2), batch)

    def rank() -> list[float]:
        save_checkpoint(tmp_path / "saved", made(3.0))
        model = made(1.0)
        load_checkpoint(tmp_path / "saved", model)
        return [float(chunk.get_buffer("scale").mean()) for chunk in model.chunks]

    assert all(found == [3.0] * len(found) for found in run_threads(rank, 2))


@pytest.mark.parametrize("schedule", ["1f1b", "zb-v"])
def test_a_module_on_the_meta_device(schedule: str) -> None:
    """Each rank makes its own part; weights with several names, on one rank or several, are one again."""
    batch = sentences(4)
    module = DECODER.module()

    def rank() -> Named:
        with torch.device("meta"):
            made = Decoder().double()
        model = Pipeline.from_module(made, make_schedule(schedule, ranks=2, microbatches=2), batch)
        for chunk in model.chunks:
            chunk.to_empty(device="cpu")
        with torch.no_grad():
            for chunk in model.chunks:
                for name, parameter in chunk.named_parameters():
                    parameter.copy_(module.get_parameter(name))
                for name, buffer in chunk.named_buffers():
                    buffer.copy_(module.get_buffer(name))
        execute_pipeline(iter([batch]), model)
        return gradients_of(model)

    results = run_threads(rank, 2)
    _, expected = plain([batch])
    assert set().union(*results) == set(expected)
    for gradients in results:
        require_near(gradients, expected)


def test_the_bytes_between_stages_are_in_the_cost_model() -> None:
    batch, cost = sentences(4), CostModel((1.0,) * 2, (1.0,) * 2, (1.0,) * 2, bandwidth=10.0)

    def rank() -> tuple[int, ...]:
        model = Pipeline.from_module(DECODER.module(), TWO, batch, cost=cost)
        assert model.cut is not None
        assert model.runner.programs.options.cost is not None
        assert model.runner.programs.options.cost.activation_bytes == tuple(map(float, model.cut.sent_bytes))
        title, first, second = f"{model.cut}".splitlines()
        assert title.split() == ["stage", "ends", "after", "parameters", "buffers", "sends"]
        assert first.startswith("0 ")
        assert first.endswith(f" {2 * LENGTH * WIDTH * 8} B > 1")
        assert second.split()[:2] == ["1", "-"]
        return model.cut.sent_bytes

    assert run_threads(rank, 2) == [(2 * LENGTH * WIDTH * 8, 0)] * 2


def test_chunks_may_be_copied() -> None:
    batch = sentences(4)

    def rank() -> None:
        model = Pipeline.from_module(DECODER.module(), TWO, batch)
        twin = Pipeline(copy.deepcopy(model.chunks), TWO)
        for made in (model, twin):
            with torch.no_grad():
                for parameter in made.parameters():
                    parameter.add_(0.5 if made is twin else 0.0)
        first, second = (
            execute_pipeline(iter([(dict(batch), None)]), each, forward_only=True, return_outputs=True).outputs
            for each in (model, twin)
        )
        if current_context().pipeline_rank == 1:
            plain = DECODER.module()
            assert torch.allclose(first.logits, plain(**batch).logits)  # type: ignore[attr-defined]  # an Output
            assert not torch.allclose(first.logits, second.logits)  # type: ignore[attr-defined]  # an Output

    run_threads(rank, 2)


def test_under_autocast_a_stage_hands_on_what_autocast_makes() -> None:
    def rank() -> tuple[torch.dtype | None, float]:
        module = seeded(Decoder(), 0)
        module.turns.double()
        model = Pipeline.from_module(module.float(), TWO, sentences(4), autocast=torch.bfloat16)
        loss = execute_pipeline(iter([sentences(4)]), model, broadcast_loss=True).loss
        assert loss is not None
        return model.cut.look(model.cut.stages[1].receives[0]).dtype if model.cut else None, loss.item()

    expected = DECODER.plain_loss(seeded(Decoder(), 0), sentences(4)).item()
    for dtype, loss in run_threads(rank, 2):
        assert dtype == torch.float32  # the residual's
        assert loss == pytest.approx(expected, rel=0.05)


def test_a_single_stage_is_the_module() -> None:
    def rank() -> Named:
        model = Pipeline.from_module(DECODER.module(), make_schedule("1f1b", ranks=1, microbatches=3), sentences(7))
        execute_pipeline(iter([sentences(7)]), model)
        return gradients_of(model)

    _, expected = plain([sentences(7)])
    [found] = run_threads(rank, 1)
    assert set(found) == set(expected)
    require_near(found, expected)


def refused(batch: Any, example: Any = None, error: type[Exception] = UsageError, **options: Any) -> list[str]:
    """What ranks are told when they make a Pipeline and train a step."""

    def make_and_train() -> None:
        model = Pipeline.from_module(Decoder(), TWO, sentences(4) if example is None else example, **options)
        execute_pipeline(iter([batch]), model)

    def rank() -> str:
        with pytest.raises(error) as caught:
            make_and_train()
        return str(caught.value)

    return run_threads(rank, 2)


def test_batches_that_are_refused() -> None:
    words = sentences(4)["input_ids"]
    unlabelled = {"input_ids": words}
    assert "training needs a loss: give the Pipeline a criterion" in refused(unlabelled, unlabelled)[0]
    uneven = {"input_ids": words, "labels": words[:3]}
    assert "the tensors of a batch differ in dim 0: [3, 4]" in refused(words, uneven)[0]
    assert "Decoder.forward has no parameter 'tokens'" in refused({"tokens": words})[0]
    told = refused(unlabelled, error=(UsageError, PipelineError))  # type: ignore[arg-type]  # pytest takes both
    assert "the module returned a Output without a loss" in told[1]


def test_ranks_that_were_given_unlike_modules() -> None:
    def rank() -> str:
        blocks = 4 + current_context().pipeline_rank
        with pytest.raises(UsageError) as caught:
            Pipeline.from_module(Decoder(blocks), TWO, sentences(4))
        return str(caught.value)

    assert all("rank 1 was given another module, example or cuts than rank 0" in told for told in run_threads(rank, 2))


class Choosing(Decoder):
    """Calls a block of its own for long sentences."""

    def __init__(self) -> None:
        super().__init__()
        self.long = nn.Linear(WIDTH, WIDTH)

    def forward(self, input_ids: Tensor, **_: Any) -> Tensor:  # type: ignore[override]  # another model
        hidden: Tensor = self.words(input_ids)
        if input_ids.shape[1] > LENGTH:
            hidden = self.long(hidden)
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden.sum()


def test_a_batch_for_which_a_stage_lacks_a_parameter() -> None:
    def rank() -> str:
        model = Pipeline.from_module(Choosing(), TWO, (sentences(4)["input_ids"], None))
        long = torch.zeros(4, LENGTH + 1, dtype=torch.long)
        with pytest.raises((UsageError, PipelineError)) as caught:
            execute_pipeline(iter([(long, None)]), model)
        return str(caught.value)

    assert any("stage 0 needs long.bias, which it does not have" in told for told in run_threads(rank, 2))


def over_gloo() -> tuple[float | None, dict[str, Any]]:
    model = Pipeline.from_module(DECODER.module(), TWO, masked_sentences(4))
    loss = execute_pipeline(iter([masked_sentences(4)]), model).loss
    return None if loss is None else loss.item(), {name: each.numpy() for name, each in gradients_of(model).items()}


@pytest.mark.slow
def test_processes() -> None:
    results = run_processes(over_gloo, 2)
    losses, expected = plain([masked_sentences(4)])
    assert [loss for loss, _ in results if loss is not None] == pytest.approx(losses, rel=1e-9)
    for _, gradients in results:
        require_near({name: torch.from_numpy(each) for name, each in gradients.items()}, expected)


def test_words_beyond_the_vocabulary_are_the_module_s_own_error() -> None:
    bad = {"input_ids": torch.full((4, LENGTH), WORDS), "labels": torch.zeros(4, LENGTH, dtype=torch.long)}
    assert "index out of range" in refused(bad, error=PipelineError)[0]


class Wrapper(nn.Module):
    """Takes any arguments, and hands them on."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = CASES["sequential"].module()

    def forward(self, *arguments: Any, **keywords: Any) -> Any:
        return self.inner(*arguments, **keywords)


@pytest.mark.parametrize("is_tuple", [False, True])
def test_a_forward_with_any_keywords_is_not_given_the_labels_of_a_criterion(is_tuple: bool) -> None:
    values, labels = vectors(4)
    batch = ((values,) if is_tuple else values), labels

    def rank() -> Tensor | None:
        model = Pipeline.from_module(Wrapper(), TWO, batch, criterion=functional.mse_loss)
        return execute_pipeline(iter([batch]), model, broadcast_loss=True).loss

    expected = functional.mse_loss(Wrapper()(values), labels).item()
    assert [loss and loss.item() for loss in run_threads(rank, 2)] == pytest.approx([expected] * 2, rel=1e-9)


def test_a_forward_with_any_keywords_is_given_labels_for_its_own_loss() -> None:
    batch = sentences(2)

    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = DECODER.module()

        def forward(self, **keywords: Any) -> Any:
            return self.inner(**keywords)

    def rank() -> Tensor | None:
        pair = {"input_ids": batch["input_ids"]}, batch["labels"]
        return execute_pipeline(iter([pair]), Pipeline.from_module(Around(), TWO, pair), broadcast_loss=True).loss

    losses, _ = plain([batch])
    assert [loss and loss.item() for loss in run_threads(rank, 2)] == pytest.approx(losses * 2, rel=1e-9)


def test_a_module_in_a_wrapper_for_replicas_is_refused() -> None:
    def rank() -> None:
        Pipeline.from_module(nn.DataParallel(DECODER.module()), TWO, sentences(2))

    with pytest.raises(Exception, match=r"wrapped in DataParallel: pass the module inside, model\.module"):
        run_threads(rank, 2)


class Padded(nn.Module):
    """torch's own encoder, which passes nested tensors from layer to layer in evaluation with a mask."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 3)

    def forward(self, values: Tensor, padding: Tensor) -> Tensor:
        output: Tensor = self.encoder(values, src_key_padding_mask=padding)
        return output


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")  # of torch's own evaluation
def test_torchs_encoder_is_evaluated_with_a_padding_mask() -> None:
    values = torch.randn(4, LENGTH, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    padding = torch.arange(LENGTH).expand(4, -1) > torch.tensor([[2], [3], [4], [3]])
    batch = {"values": values, "padding": padding}, None

    def rank() -> Any:
        model = Pipeline.from_module(seeded(Padded().double(), 0), TWO, batch, criterion=lambda *_: torch.zeros(()))
        model.eval()
        return execute_pipeline(iter([batch]), model, forward_only=True, return_outputs=True).outputs

    found = run_threads(rank, 2)[1]
    with torch.no_grad():
        expected = seeded(Padded().double(), 0).eval()(values, padding)
    assert torch.allclose(found[~padding], expected[~padding], rtol=1e-9)
