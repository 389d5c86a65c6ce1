"""Slices of a sequence: do they gain what their simulation promises? On 4 ranks whose stages sleep for each slice, with
attention as half of the work; on 2 x 2 such ranks of which two share the tokens of each sequence; and on 2 ranks with a
GPT of pipeflow.models, at 4,096 tokens.
"""

from __future__ import annotations

import statistics
import weakref
from collections import Counter
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

import pipeflow
from benchmarks.measure import alternate, paired, step_times
from benchmarks.models import Sleep, TokenMean
from benchmarks.processes import run_ranks
from benchmarks.report import Report
from benchmarks.task import Contender
from pipeflow.core.dataflow import Content
from pipeflow.engine.deferral.past import tokens_before
from pipeflow.engine.parallel.context import current_context
from pipeflow.engine.tensor.context_attention import ContextAttention
from pipeflow.models import GPTLMLoss, build_gpt_pipeline

TOKENS, ATTENTION = 4096, 0.5
RANKS, MICROBATCHES, FORWARD, BACKWARD = 4, 8, 0.160, 0.320  # of stages that sleep
LAYERS, WIDTH = 2, 128  # of each rank's GPT
SIZES: dict[str, Any] = {"hidden_size": WIDTH, "num_attention_heads": 4, "vocab_size": 256}
TRACED = 3  # steps of which the middle one gives costs


class SleepingSlice(nn.Module):
    """A stage that sleeps as long as a slice of a causal model computes. Its context ranks share that time, after they
    have exchanged a number for each token, as they would keys.
    """

    shares_tokens = True

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.over_context = ContextAttention()

    def forward(self, hidden: Tensor | None = None, input_ids: Tensor | None = None) -> Tensor:
        tokens = input_ids[..., None].float() if hidden is None and input_ids is not None else hidden
        assert tokens is not None
        ranks, start = self.over_context.group.size, tokens_before(self)
        if ranks > 1:
            heads = tokens[:, None]
            tokens = self.over_context(heads, heads, heads, _last)[:, 0]
        places = start / TOKENS, (start + ranks * tokens.shape[1]) / TOKENS
        share = (1 - ATTENTION) * (places[1] - places[0]) + ATTENTION * (places[1] ** 2 - places[0] ** 2)
        sleep: Any = Sleep.apply
        output: Tensor = sleep(tokens * self.scale, share * FORWARD / ranks, share * BACKWARD / ranks)
        return output


def _last(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """In the place of attention: the value of each query's own token."""
    return value.narrow(2, value.shape[2] - query.shape[2], query.shape[2])


def run(rounds: int | None = None) -> Report:
    rounds = rounds or 5
    title = f"slices: {TOKENS} tokens, in {rounds} rounds"
    columns = ["stages", "slices", "step ms", "simulated gain", "measured gain", "measured / simulated step"]
    columns += ["the same, by costs of this row's slices", "simulated peak of rank 0, microbatches"]
    report = Report("slices", title, [*columns, "measured / simulated peak"])
    data, fixed = {}, {}
    for name, ranks, context in (("sleep", RANKS, 1), ("sleep", 2, 2), ("gpt", 2, 1)):
        options = {"name": name, "rounds": rounds, "launch": {"pipeline": ranks, "context": context}}
        results = run_ranks("slices:measure", ranks * context, options, deadline=300 + 60 * rounds)
        times, simulated = step_times([each["times"] for each in results]), results[0]["simulated"]
        own, stages = results[0]["by own costs"], f"{name}, {ranks} ranks" + f" of {context} context" * (context > 1)
        data[stages] = {"seconds": times, "simulated": simulated, "by own costs": own}
        for ways in times:
            step, gain = statistics.median(times[ways]), simulated["whole"] / simulated[ways]
            figures = [gain, paired(times, "whole", ways), step / simulated[ways], step / own[ways]]
            if name == "gpt":  # a stage that sleeps saves next to nothing
                peak = results[0]["simulated peaks"][ways]
                figures += [peak, results[0]["peaks"][ways] / peak]
            report.rows.append(
                [stages, ways, f"{1e3 * step:.0f}", *(f"{each:.3f}" for each in figures)] + ["", ""] * (name != "gpt")
            )
        fixed[name] = 1e3 * results[0]["fixed"]
    report.data = data
    report.notes += [
        "targets: measured / simulated within 0.95 and 1.05; of sleeping stages, the step of slices of equal cost is "
        "(M q + P - 1) / (q (M + P - 1)) of 1f1b within 3 %: "
        f"{RANKS - 1 + 4 * MICROBATCHES} / {4 * (RANKS - 1 + MICROBATCHES)} with 4 slices, a gain of "
        f"{4 * (RANKS - 1 + MICROBATCHES) / (RANKS - 1 + 4 * MICROBATCHES):.3f}",
        "the simulated gain, and measured / simulated step, take costs of whole microbatches: what these promise, if "
        "slices took no longer in all. The column after it takes the costs of traced steps in the same slices (a mean "
        "over microbatches, with what the engine does between actions), as every other benchmark of a schedule does",
        "peaks: bytes that autograd saved, over those of a whole microbatch; the simulated peak counts the tokens that "
        "are saved, and the buffer of keys, which has all tokens of a sequence",
        f"a forward or backward of a slice took {fixed['sleep']:.2f} ms longer than it slept, in a traced step: costs "
        "of whole microbatches leave this out, and slices have it more often",
        "the costs of the GPT come from traced steps of 1f1b, its share of attention from steps of 1,024 to 4,096 "
        "tokens; those of stages that sleep are known",
    ]
    return report


def measure(name: str, rounds: int) -> dict[str, Any]:
    """On every rank: the times of whole microbatches, of equally long slices and of slices of equal cost."""
    from benchmarks.links import go_first

    if name == "sleep":
        go_first()
    ranks, context = current_context().pipeline_size, current_context().context_size
    schedules = {
        slices: pipeflow.make_schedule("1f1b", ranks=ranks, microbatches=MICROBATCHES, slices=slices)
        for slices in (1, 4)
    }
    times = (FORWARD / context,) * ranks, (BACKWARD / context,) * ranks, (0.0,) * ranks
    if name == "sleep":
        stage: nn.Module = SleepingSlice()
        criterion: nn.Module = TokenMean()
        cost = pipeflow.CostModel(*times, attention=ATTENTION)
    else:
        stage = build_gpt_pipeline(LAYERS * ranks, max_position_embeddings=TOKENS, **SIZES)
        criterion = GPTLMLoss()
        cost = _of_whole(stage, schedules[1], criterion)
    ways = {
        "whole": (schedules[1], cost),
        "equally long": (schedules[4], replace(cost, attention=0.0)),
        "equal cost": (schedules[4], cost),
    }
    batch, models, contenders = _batch(MICROBATCHES), {}, {}
    for way, (schedule, each) in ways.items():
        models[way] = pipeflow.Pipeline(stage, schedules[1], criterion=criterion, cost=each)
        contenders[way] = Contender(way, partial(_step, batch, models[way], schedule), [stage])
    peaks = {way: _peak(contender) for way, contender in contenders.items()}
    whole = _peak(Contender("alone", partial(_step, _batch(1), models["whole"], schedules[1].first(1)), [stage]))
    simulated, fullest, own, fixed = {}, {}, {}, 0.0
    for way, (schedule, each) in ways.items():
        ends = pipeflow.equal_slices(TOKENS, schedule.slices, attention=each.attention)
        keys = 2 * WIDTH * TOKENS * LAYERS * 4 / whole if name == "gpt" and schedule.slices > 1 else 0.0
        saved: dict[str, Any] = {"saved_bytes": (1 - keys,) * ranks, "kept_bytes": {Content.KEYS: (keys,) * ranks}}
        timeline = pipeflow.simulate(schedule, replace(cost, slice_ends=ends, **saved))
        simulated[way], fullest[way] = timeline.makespan, timeline.peak_bytes[0]
        traced = _traced(models[way], schedule, batch)
        own[way] = pipeflow.simulate(schedule, pipeflow.measured_costs(traced)).makespan
        fixed = (_computed(traced) - _computed(timeline)) / sum(map(len, timeline.rows))
    return {
        "times": alternate(contenders, rounds),
        "simulated": simulated,
        "by own costs": own,
        "peaks": {way: peak / whole if whole else 0.0 for way, peak in peaks.items()},
        "simulated peaks": fullest,
        "fixed": fixed,
    }


def _batch(samples: int, length: int = TOKENS) -> Any:
    tokens = torch.zeros(samples, length, dtype=torch.long)
    return {"input_ids": tokens}, tokens


def _computed(timeline: pipeflow.Timeline) -> float:
    """The seconds of all actions of a step."""
    return sum(span.end - span.start for row in timeline.rows for span in row)


def _step(batch: Any, model: pipeflow.Pipeline, schedule: pipeflow.Schedule) -> pipeflow.Output:
    return pipeflow.execute_pipeline(iter([batch]), model, schedule=schedule)


def _traced(model: pipeflow.Pipeline, schedule: pipeflow.Schedule, batch: Any) -> pipeflow.Timeline:
    """Of some steps after the first, the one whose actions take the median time in all."""
    timelines = [
        pipeflow.execute_pipeline(iter([batch]), model, schedule=schedule, trace=True).timeline
        for _ in range(1 + TRACED)
    ]
    found = sorted((each for each in timelines[1:] if each is not None), key=_computed)
    return found[len(found) // 2]


def _of_whole(stage: nn.Module, schedule: pipeflow.Schedule, criterion: nn.Module) -> pipeflow.CostModel:
    """The costs of this GPT from steps of whole microbatches, with the share of attention by steps of other lengths."""
    model = pipeflow.Pipeline(stage, schedule, criterion=criterion)
    times = {}
    for length in (TOKENS // 4, TOKENS // 2, TOKENS):
        cost = pipeflow.measured_costs(_traced(model, schedule, _batch(MICROBATCHES, length)))
        times[length] = sum(cost.forward) + sum(cost.backward_input) + sum(cost.backward_weight)
    return replace(cost, attention=pipeflow.attention_share(times, TOKENS))


class _Saved:
    """In the place of a tensor that autograd saved."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def _peak(contender: Contender) -> float:
    """The most bytes that autograd has saved at once on this rank in a step, without weights."""
    weights = {each.untyped_storage().data_ptr() for module in contender.modules for each in module.parameters()}
    alive: Counter[int] = Counter()
    now = most = 0

    def pack(tensor: Tensor) -> _Saved:
        nonlocal now, most
        saved, storage = _Saved(tensor.detach()), tensor.untyped_storage()
        key, size = storage.data_ptr(), 0 if storage.data_ptr() in weights else storage.nbytes()
        now += size if not alive[key] else 0
        most, alive[key] = max(most, now), alive[key] + 1
        weakref.finalize(saved, drop, key, size)
        return saved

    def drop(key: int, size: int) -> None:
        nonlocal now
        alive[key] -= 1
        now -= size if not alive[key] else 0

    with saved_tensors_hooks(pack, lambda saved: saved.tensor):
        contender.step()
    return float(most)
