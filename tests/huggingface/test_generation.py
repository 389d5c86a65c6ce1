"""Text from a pipeline is that of the whole model: greedily, sampled, and by beams."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipeflow import Pipeline, Schedule, UsageError, execute_pipeline, make_schedule
from pipeflow.adapters.huggingface.caches import Caches
from pipeflow.engine.stages.stage import ModuleStage
from pipeflow.huggingface import generate
from pipeflow.testing import run_processes, run_threads
from pipeflow.testing.ranks import RankError
from tests.covering import some
from tests.stages.families import FAMILIES, make

transformers = pytest.importorskip("transformers", reason="not installed", exc_type=ImportError)
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

NEO: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_layers": 4,
    "num_heads": 4,
    "window_size": 4,
    "resid_dropout": 0.0,
}
NEO |= {"attention_types": [[["global", "local"], 2]], "max_position_embeddings": 64}
MORE: dict[str, tuple[str, str, dict[str, Any], Any]] = {
    "gpt-neo-long": ("GPTNeoForCausalLM", "GPTNeoConfig", NEO, FAMILIES["gpt2"][3]),
    "mistral-window": ("MistralForCausalLM", "MistralConfig", FAMILIES["mistral"][2] | {"sliding_window": 5}, None),
    "gemma2-window": ("Gemma2ForCausalLM", "Gemma2Config", FAMILIES["gemma2"][2] | {"sliding_window": 5}, None),
}
NAMED = ("gpt2", "mistral-window")
OTHERS = ("llama", "bloom", "qwen3", "glm", "gptj", "gpt-neo-long", "opt", "mistral", "gemma2-window", "llama-tied")
EACH = [*NAMED, *(pytest.param(name, marks=pytest.mark.exhaustive) for name in OTHERS)]
TWO, THREE = (make_schedule("1f1b", ranks=ranks, microbatches=2) for ranks in (2, 3))
LENGTH: dict[str, Any] = {
    "max_new_tokens": 8,
    "do_sample": False,
    "pad_token_id": 0,
    "eos_token_id": 99,
}  # never comes


def made(name: str) -> tuple[Any, dict[str, Any]]:
    if name not in FAMILIES:
        kind, config, sizes, batch = MORE[name]
        FAMILIES[name] = kind, config, sizes, batch or FAMILIES["llama"][3]
    module, batch = make(transformers, name)
    return module.eval(), batch


def prompt(rows: int = 3) -> dict[str, Any]:
    """Rows of several lengths, padded on the left."""
    ids = torch.randint(3, 50, (rows, 6), generator=torch.Generator().manual_seed(5))
    mask = torch.ones_like(ids)
    mask[0, :2] = 0
    return {"input_ids": ids * mask, "attention_mask": mask}


def piped(name: str, schedule: Schedule, **keywords: Any) -> tuple[Any, Pipeline]:
    module, batch = made(name)
    model = Pipeline.from_module(module, schedule, batch)
    model.eval()
    return generate(model, **{**prompt(), **LENGTH, **keywords}), model


def texts(name: str, schedule: Schedule, keywords: dict[str, Any]) -> Any:
    return piped(name, schedule, **keywords)[0]


def expected(name: str, **keywords: Any) -> Any:
    return made(name)[0].generate(**{**prompt(), **LENGTH, "use_cache": True, **keywords})


TOLD = {"return_dict_in_generate": True, "output_logits": True}


def require_same(outputs: list[Any], wanted: Any) -> None:
    for output in outputs:
        assert torch.equal(output.sequences, wanted.sequences)
        assert output.past_key_values is None
        for here, there in zip(output.logits, wanted.logits, strict=True):
            # in float32, as transformers' loop has them; Gemma2 gives nan where a window holds padding alone
            assert torch.allclose(here, there, rtol=1e-5, atol=1e-5, equal_nan=True)


@pytest.mark.some(1)
@pytest.mark.parametrize("name", EACH)
def test_three_stages_go_on_as_the_whole_model_does(name: str) -> None:
    keywords = {**TOLD, "max_new_tokens": 12}
    wanted = expected(name, **keywords)
    assert wanted.sequences.shape == (3, 18)
    require_same(run_threads(texts, 3, name, THREE, keywords), wanted)


def answers(name: str, schedule: Schedule, cuts: Any, keywords: dict[str, Any]) -> Any:
    module, batch = made(name)
    model = Pipeline.from_module(module, schedule, batch, cuts=cuts)
    torch.manual_seed(3)
    return generate(model.eval(), **asked(batch), **{**LENGTH, **keywords})


def answer(name: str, keywords: dict[str, Any]) -> Any:
    module, batch = made(name)
    torch.manual_seed(3)
    return module.generate(**asked(batch), **{**LENGTH, **keywords}, use_cache=True)


def asked(batch: dict[str, Any]) -> dict[str, Any]:
    return {name: entry for name, entry in batch.items() if name != "labels"}


WITHIN, BETWEEN = [1.0, 1.0, 0, 0, 0, 1.0], [0, 1.0, 1.0, 1.0, 0, 0]


@pytest.mark.exhaustive
@pytest.mark.parametrize("cuts", some([WITHIN, BETWEEN], [WITHIN]), ids=["cut in the encoder", "cut in the decoder"])
@pytest.mark.parametrize("name", ["t5", pytest.param("bart", marks=pytest.mark.exhaustive)])
def test_encoders_run_once(name: str, cuts: list[float]) -> None:
    for keywords in (TOLD, {**TOLD, "num_beams": 2}):
        require_same(run_threads(answers, 2, name, TWO, cuts, keywords), answer(name, keywords))


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "name", ["whisper", *(pytest.param(name, marks=pytest.mark.exhaustive) for name in ("t5", "bart"))]
)
def test_encoders_of_three_stages(name: str) -> None:
    keywords = {"do_sample": True, "temperature": 3.0}
    wanted = answer(name, keywords)
    for text in run_threads(answers, 3, name, THREE, None, keywords):
        assert torch.equal(text, wanted)


@pytest.mark.exhaustive
def test_processes() -> None:
    require_same(run_processes(texts, 2, "llama", TWO, TOLD), expected("llama", **TOLD))


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "schedule",
    [
        "zb-v",
        "dualpipe",
        *(pytest.param(name, marks=pytest.mark.exhaustive) for name in ("interleaved-1f1b", "dualpipe-v")),
    ],
)
def test_schedules(schedule: str) -> None:
    wanted = expected("gpt2")
    for text in run_threads(texts, 2, "gpt2", make_schedule(schedule, ranks=2, microbatches=4), {}):
        assert torch.equal(text, wanted)


@pytest.mark.exhaustive
@pytest.mark.parametrize("microbatches", some([1, 3], [3]))
def test_beams_pass_between_microbatches(microbatches: int) -> None:
    wanted = expected("gpt2", num_beams=4, num_return_sequences=2)
    keywords = {"num_beams": 4, "num_return_sequences": 2}
    schedule = make_schedule("gpipe", ranks=2, microbatches=microbatches)
    for text in run_threads(texts, 2, "gpt2", schedule, keywords):
        assert torch.equal(text, wanted)


@pytest.mark.exhaustive
def test_beams_pass_in_whichever_order_the_microbatches_ran() -> None:
    caches = Caches(transformers.GPT2Config(n_layer=1))
    for first in (2, 0):
        rows = torch.arange(first, first + 2)
        values = rows.reshape(2, 1, 1, 1).float()
        caches.of(0, rows).layers[0].update(values, values)
    caches.apply(("reorder_cache", [torch.tensor([0, 0, 3, 3])], 1))
    for first, wanted in ((0, [0, 0]), (2, [3, 3])):
        assert caches.of(0, torch.tensor([first, first + 1])).layers[0].keys.flatten().tolist() == wanted


SAMPLED = {"do_sample": True, "temperature": 1.5, "top_k": 40, "top_p": 0.9, "num_return_sequences": 2}


def sample() -> Any:
    module, batch = made("llama")
    model = Pipeline.from_module(module, TWO, batch)
    torch.manual_seed(3)  # all threads share torch's generator; a Pipeline is made by all ranks together
    return generate(model.eval(), **{**prompt(), **LENGTH, **SAMPLED})


@pytest.mark.exhaustive
def test_samples_are_those_of_the_same_seed() -> None:
    module, _ = made("llama")
    torch.manual_seed(3)
    wanted = module.generate(**{**prompt(), **LENGTH, **SAMPLED, "use_cache": True})
    for text in run_threads(sample, 2):
        assert torch.equal(text, wanted)


@pytest.mark.exhaustive
def test_a_prompt_is_looked_up_for_candidates_which_are_taken_back() -> None:
    keywords = {**prompt(1), "prompt_lookup_num_tokens": 3, "max_new_tokens": 24}
    wanted = expected("mistral-window", **keywords)
    for text in run_threads(texts, 2, "mistral-window", TWO, keywords):
        assert torch.equal(text, wanted)


@pytest.mark.exhaustive
def test_rows_end_at_the_end_of_text_and_scores_are_told() -> None:
    keywords: dict[str, Any] = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    keywords["eos_token_id"] = expected("llama")[:, 9].tolist()
    wanted = expected("llama", **keywords)
    assert wanted.sequences.shape[1] <= 10
    for output in run_threads(texts, 2, "llama", TWO, keywords):
        assert torch.equal(output.sequences, wanted.sequences)
        for here, there in zip((*output.scores, *output.logits), (*wanted.scores, *wanted.logits), strict=True):
            assert torch.allclose(here, there)


class Streamed:
    """Gets the tokens as they come."""

    def __init__(self) -> None:
        self.tokens: list[Tensor] = []

    def put(self, tokens: Tensor) -> None:
        self.tokens.append(tokens)

    def end(self) -> None:
        pass


def stream() -> list[Tensor]:
    streamer = Streamed()
    piped("gpt2", TWO, **prompt(1), streamer=streamer)
    return streamer.tokens


@pytest.mark.exhaustive
def test_the_last_stages_rank_streams() -> None:
    first, last = run_threads(stream, 2)
    assert not first
    assert torch.equal(torch.cat([each.flatten() for each in last]), expected("gpt2", **prompt(1))[0])


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", some(["llama", "gpt2", "bloom"], ["llama"]))
def test_tensor_ranks(name: str) -> None:
    wanted = expected(name)
    for text in run_threads(texts, 4, name, make_schedule("1f1b", ranks=2, microbatches=2), {}, tensor=2):
        assert torch.equal(text, wanted)


def each_its_own() -> tuple[int, Any]:
    module, batch = made("gpt2")
    model = Pipeline.from_module(module, make_schedule("1f1b", ranks=2, microbatches=1), batch)
    model.eval()
    rank = model.context.data_rank
    return rank, generate(model, **prompt(1 + rank), **{**LENGTH, "max_new_tokens": 3 + 5 * rank})


@pytest.mark.exhaustive
def test_replicas_have_prompts_of_their_own() -> None:
    for rank, text in run_threads(each_its_own, 4, data=2):
        assert torch.equal(text, expected("gpt2", **prompt(1 + rank), max_new_tokens=3 + 5 * rank))


def plans_of(name: str) -> tuple[int, int]:
    _, model = piped(name, make_schedule("1f1b", ranks=2, microbatches=1))
    stage = model.chunks[0]
    assert isinstance(stage, ModuleStage)
    return len(stage._planner._plans), len(model.runner.programs._kept)


@pytest.mark.exhaustive
def test_a_prompt_and_its_tokens_are_planned_once_each() -> None:
    assert run_threads(plans_of, 2, "gpt2") == [(3, 1)] * 2  # of the example, the prompt and a token


def train_and_generate() -> Any:
    module, batch = made("llama")
    model = Pipeline.from_module(module, TWO, batch)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    first = generate(model.eval(), **prompt(), **LENGTH)
    execute_pipeline(iter([batch]), model.train())
    optimizer.step()
    return first, generate(model.eval(), **prompt(), **LENGTH)


@pytest.mark.exhaustive
def test_between_steps_of_training() -> None:
    module, batch = made("llama")
    wanted = [module.generate(**prompt(), **LENGTH, use_cache=True)]
    module.train()(**batch).loss.backward()
    torch.optim.SGD(module.parameters(), lr=0.1).step()
    wanted.append(module.eval().generate(**prompt(), **LENGTH, use_cache=True))
    for texts in run_threads(train_and_generate, 2):
        assert all(torch.equal(text, its) for text, its in zip(texts, wanted, strict=True))


def refused(name: str, **keywords: Any) -> str:
    def run() -> str:
        with pytest.raises(UsageError) as caught:
            piped(name, make_schedule("1f1b", ranks=1, microbatches=1), **keywords)
        return str(caught.value)

    return str(run_threads(run, 1)[0])


@pytest.mark.exhaustive
def test_a_model_without_a_head_generates_nothing() -> None:
    assert "a BertForMaskedLM cannot generate text: use a class" in refused("bert")


@pytest.mark.exhaustive
@pytest.mark.parametrize("ids", [torch.ones(1, 0).long(), None])
def test_a_prompt_has_tokens(ids: Tensor | None) -> None:
    assert "needs a prompt of at least one token" in refused("gpt2", input_ids=ids, attention_mask=None)


@pytest.mark.exhaustive
def test_caches_are_the_pipelines_own() -> None:
    assert "remove use_cache= and past_key_values=" in refused("gpt2", use_cache=False)
    assert "got a StaticCache of StaticLayer: remove cache_implementation=" in refused(
        "gpt2", cache_implementation="static"
    )


@pytest.mark.exhaustive
def test_other_pipelines_are_refused() -> None:
    def run() -> None:
        with pytest.raises(UsageError, match="generate takes a pipeflow"):
            generate(nn.Linear(1, 1), prompt()["input_ids"])  # type: ignore[arg-type]  # what is tested
        model = Pipeline(nn.Linear(1, 1), make_schedule("1f1b", ranks=1, microbatches=1))
        with pytest.raises(UsageError, match="needs a Pipeline of a whole model of transformers"):
            generate(model, prompt()["input_ids"])

    run_threads(run, 1)


def within_a_step() -> None:
    module, batch = made("gpt2")

    def criterion(output: Any, labels: object) -> Tensor:
        with pytest.raises(UsageError, match="generate was called within a step of the same Pipeline"):
            generate(model, prompt()["input_ids"])
        loss: Tensor = output.loss
        return loss

    model = Pipeline.from_module(module, make_schedule("1f1b", ranks=1, microbatches=1), batch, criterion=criterion)
    execute_pipeline(iter([batch]), model)


def test_not_within_a_step() -> None:
    run_threads(within_a_step, 1)


@pytest.mark.exhaustive
def test_what_transformers_refuses_is_raised_on_every_rank() -> None:
    with pytest.raises(RankError) as caught:
        run_threads(texts, 2, "gpt2", make_schedule("1f1b", ranks=2, microbatches=1), {"nonsense": 1})
    assert str(caught.value).count("PipelineError") >= 2
    assert "not used by the model: ['nonsense']" in str(caught.value)
