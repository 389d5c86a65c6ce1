"""Jobs: a step of a job without a pipeline, and what stands out in it. Must not contain: how the time of a rank is
divided, and how it is printed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from pipeflow.core.errors import UsageError
from pipeflow.core.text import listed
from pipeflow.tools.traces.events import RankEvents
from pipeflow.tools.traces.rank_times import (
    COLLECTIVES,
    LOADER,
    OTHER,
    RankTimes,
    Wait,
    exchanges_of,
    steps_of_job,
    times_of,
    waits_of,
)
from pipeflow.tools.traces.trace_findings import LEAST, SMALL, Finding

OUTLIER = 1.2  # times the median step
MOST = 0.5  # share of a time that is most of it
HIDDEN = "that no computation hides{where}; {hidden:.0%} of its time is hidden"
SAID = {  # what costs time, and what can be done, by its kind and what was recorded
    "all-gather": f"all-gather {HIDDEN}; gather earlier, beside what is computed before (prefetch), or shard less",
    "reduce-scatter": f"reduce-scatter {HIDDEN}; start it as soon as gradients are there, or accumulate more batches",
    "all-reduce": f"all-reduce {HIDDEN}; of gradients, smaller buckets start earlier, and accumulation makes it rarer",
    "all-to-all": f"all-to-all {HIDDEN}; compute on another part of the batch meanwhile, or exchange less",
    "broadcast": f"broadcast {HIDDEN}; what the others wait for the rank that sends is in it",
    "send/receive": f"sends and receives {HIDDEN}; exchange the next part while this one is computed",
    OTHER: f"communication of an unknown kind {HIDDEN}; start it earlier, while something computes",
    "data loading, alone": "the data loader runs and nothing else{where}; it is in the process itself: set num_workers",
    "data loading, several": "the data loader runs and nothing else{where}; try more workers or a longer prefetch",
    "optimizer, device": "the optimizer runs{where}, in {pieces} pieces; fused=True needs fewer if it is not set",
    "optimizer, operators": "the optimizer runs{where}",
    "copies": "memory is copied while nothing computes{where}; from pinned memory, non_blocking=True copies meanwhile",
    "launch": "{pieces} times, the device has not yet begun what was launched{where}",
    "host, device": "{pieces} short pauses until the host launches more{where}; larger batches, torch.compile or CUDA "
    "graphs need fewer launches",
    "host, operators": "{pieces} short pauses between operators{where}; larger batches or torch.compile need fewer",
    "pauses, device": "the device is idle in long pauses{where}{pauses}",
    "pauses, operators": "no operator runs in long pauses{where}{pauses}",
    "idle": "nothing runs on the device{where}",
}


@dataclass(frozen=True)
class Job:
    """A step of a job without a pipeline.

    Attributes:
        by: what divides the recording into steps, "mark", "update" or "recording", as in `steps_of_job`.
        step_seconds: the length of every step, on the rank that takes longest.
        step: the index of the one of median length.
        ranks: the times of each rank in this step.
        findings: what stands out, the most expensive first.
        notes: sentences on what the traces do not say.
    """

    by: str
    step_seconds: tuple[float, ...]
    step: int
    ranks: tuple[RankTimes, ...]
    findings: tuple[Finding, ...]
    notes: tuple[str, ...]

    @property
    def seconds(self) -> float:
        """The length of the median step."""
        return self.step_seconds[self.step]

    @property
    def outliers(self) -> tuple[int, ...]:
        """The indices of steps that took much longer than the median one."""
        return tuple(index for index, each in enumerate(self.step_seconds) if each > OUTLIER * self.seconds)


def job_of(ranks: Sequence[RankEvents], notes: Sequence[str]) -> Job:
    """The median step of a job, on the ranks that were recorded. Raises UsageError if it has no length."""
    by, steps = steps_of_job(ranks)
    lengths = [max(end - start for start, end in each) for each in steps]
    step = sorted(range(len(lengths)), key=lambda index: lengths[index])[(len(lengths) - 1) // 2]
    windows = steps[step]
    if min(end - start for start, end in windows) <= 0:
        raise UsageError(f"{ranks[0].source}: its step takes no time: record at least one whole step")
    sent = [exchanges_of(each) for each in ranks]
    waits = waits_of(ranks, sent, windows)
    numbers = [each.rank or 0 for each in ranks]
    if len(ranks) == 1 and not ranks[0].ranks:  # a number in the name of its only file is none of a rank
        ranks, numbers = [replace(ranks[0], rank=0)], [0]
    times = [times_of(*own, numbers) for own in zip(ranks, sent, waits, windows, strict=True)]
    found = [*_own(times, ranks), *_last_ranks(times, waits)]
    least = max(LEAST * lengths[step], SMALL * max((each.seconds for each in found), default=0.0))
    findings = sorted((each for each in found if each.seconds > least), key=lambda each: -each.seconds)
    alone = [
        kind
        for own, known, (start, end) in zip(sent, waits, windows, strict=True)
        for index, (kind, each) in enumerate(own)
        if index not in known and start <= each.launched < end
    ]
    said = [*notes, *_unknown(ranks, times, by, dict.fromkeys(alone))]
    return Job(by, tuple(lengths), step, tuple(times), tuple(findings), tuple(said))


def _unknown(ranks: Sequence[RankEvents], times: Sequence[RankTimes], by: str, alone: Iterable[str]) -> Iterator[str]:
    """What the traces do not say."""
    whole = max(each.ranks or 0 for each in ranks)
    if by == "recording":
        yield "nothing divides the recording into steps: call step() of torch.profiler after each one"
    if by == "update":
        yield "the profiler marks no steps, so a step is from the end of one optimizer step to the end of the next one"
    if len(ranks) < whole:
        yield f"{len(ranks)} of {whole} ranks were recorded: what others wait for is not known"
    if kinds := listed(list(alone)):
        why = "one rank alone does not show it" if len(ranks) == 1 else "nothing shows which rank came last"
        yield f"waiting for other ranks is counted as communication in {kinds}: {why}"
    if any(len(each.devices) > 1 for each in ranks):
        yield "a rank has several devices: it computes where at least one of them does"
    if any(each.launches and not own.on_device for each, own in zip(ranks, times, strict=True)):
        yield "work was launched on a device, but what ran there was not recorded: times are those of the host"
    if any(own.part("idle") for own in times):
        yield "nothing says when kernels were launched: record the CPU, too, to see why a device is idle"


def _own(times: Sequence[RankTimes], ranks: Sequence[RankEvents]) -> Iterator[Finding]:
    """What each kind of lost time costs on the rank on which it costs most."""
    kinds = dict.fromkeys(kind for each in times for kind, _ in each.parts)
    for kind in (each for each in kinds if each not in ("computes", "waiting")):
        seconds, worst = max((each.part(kind), place) for place, each in enumerate(times))
        own = times[worst]
        words = {
            "where": f" on rank {own.rank}" * (len(times) > 1),
            "pieces": own.pieces.get(kind, 0),
            "hidden": next((each.hidden / each.seconds for each in own.communications if each.kind == kind), 0.0),
            "pauses": _named(own),
        }
        alone = any(each.name.startswith(LOADER) and "_SingleProcess" in each.name for each in ranks[worst].ranges)
        key = f"{kind}, {'alone' if alone else 'several'}" if kind == "data loading" else kind
        text = SAID.get(key) or SAID[f"{kind}, {'device' if own.on_device else 'operators'}"]
        yield Finding(kind, own.rank, seconds, text.format(**words))


def _named(own: RankTimes) -> str:
    """What the host does in the long pauses of a rank, the longest first."""
    whole = own.part("pauses")
    causes = sorted(((time, cause) for (kind, cause), time in own.parts.items() if kind == "pauses"), reverse=True)
    told = [f"{cause!r} {time / whole:.0%}" for time, cause in causes if cause and time > SMALL * whole]
    names = f"; of them, the host is in {', '.join(told)}" if told else ""
    unnamed = own.parts.get(("pauses", ""), 0.0)
    if unnamed > MOST * whole:
        names += "; nothing names what the host does then: use torch.profiler.record_function"
    return names


def _last_ranks(times: Sequence[RankTimes], waits: Sequence[Mapping[int, Wait]]) -> Iterator[Finding]:
    """The ranks for which others wait in collectives, and what they do meanwhile."""
    for place, last in enumerate(times):
        others = [each for each in times if each is not last]
        waited = [each.parts.get(("waiting", f"rank {last.rank}"), 0.0) for each in others]
        if any(waited):
            seconds, often = fmean(waited), sum(each.last == place for each in waits[place].values())
            count = f"comes last to {often} of its {len(waits[place])} collectives"
            text = f"the other ranks wait for rank {last.rank}, which {count}{_reason(last, others, seconds)}"
            yield Finding("last rank", last.rank, seconds, text)


def _reason(last: RankTimes, others: Sequence[RankTimes], waited: float) -> str:
    """What a rank does longer than the others do on average, if that is most of what they wait."""
    more = {
        key: seconds - fmean(each.parts.get(key, 0.0) for each in others)
        for key, seconds in last.parts.items()
        if key[0] not in (*COLLECTIVES, OTHER, "waiting")
    }
    kind, cause = max(more, key=lambda key: more[key])
    if more[kind, cause] < MOST * waited:
        return ""
    usual = fmean(each.parts.get((kind, cause), 0.0) for each in others)
    words = {
        "computes": "computes",
        "optimizer": "is in the optimizer",
        "data loading": "waits for its data loader",
        "copies": "copies memory",
    }.get(kind, f"stands still{f' in {cause!r}' if cause else ''}")
    factor = f" {last.parts[kind, cause] / usual:.3g} times as long as they do" if usual else ", and they do not"
    return f": it {words}{factor}"
