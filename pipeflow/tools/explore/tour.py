"""Tour: ten questions about schedules that the reader answers by changing one. Must not contain: how the page shows it,
and numbers in texts that no test computes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from pipeflow.core.timeline import Timeline
from pipeflow.tools.explore.state import State

Fields = Mapping[str, str]


class TourStep(NamedTuple):
    """One step of the tour.

    Attributes:
        title: its name in the list of steps.
        question: what it asks.
        look: what the reader sees at the start.
        task: what the reader may try.
        answer: the answer, which appears when the step is reached.
        cost: what the gain costs.
        start: the fields of the link that it starts from.
        goal: the fields that "Show me" sets; with them it is reached.
        reached: whether a timeline that is shown in a state answers the question.
        more: further links: what they show, and their fields.
    """

    title: str
    question: str
    look: str
    task: str
    answer: str
    cost: str
    start: Fields
    goal: Fields
    reached: Callable[[State, Timeline], bool]
    more: Mapping[str, Fields] = {}

    def as_json(self) -> dict[str, Any]:
        """All but the condition, which Python decides; `controls` has the fields that the reader changes."""
        values = self._asdict()
        del values["reached"]
        return values | {"controls": [name for name, value in self.goal.items() if self.start.get(name) != value]}


def reached(state: State, timelines: tuple[Timeline, ...]) -> list[int]:
    """The numbers of the steps whose condition any of the timelines fulfils."""
    return [number for number, step in enumerate(STEPS, 1) if any(step.reached(state, each) for each in timelines)]


def _size(schedule: str, microbatches: int = 8, ranks: int = 4, **more: float) -> dict[str, str]:
    """The fields of a link."""
    sizes = {"schedule": schedule, "ranks": str(ranks), "microbatches": str(microbatches)}
    return sizes | {name: f"{value:g}" for name, value in more.items()}


def _named(name: str) -> Callable[[State, Timeline], bool]:
    """Whether this schedule is shown."""
    return lambda state, timeline: timeline.name == name


UNDER_TEN = 0.1 - 1e-9  # without rounding errors: exactly 10% is not under 10%
BESIDE = "1f1b,interleaved-1f1b,eager-1f1b"

STEPS = (
    TourStep(
        title="A pipeline",
        question="Why is rank 3 idle at the start?",
        look=(
            "The model is cut into 4 stages, one after the other, and each rank has one of them. Each row of the "
            "picture is a rank, and time runs to the right. The number in a block is its microbatch, which is a part "
            "of the batch. Now there is only one, number 0: the whole batch."
        ),
        task="Move the slider of microbatches to 4, and watch when each rank works.",
        answer=(
            "Rank 3 has the last stage. Its input comes from rank 2, whose input comes from rank 1, whose input comes "
            "from rank 0: so rank 3 starts after 3 forwards. The backwards go the other way, and rank 0 waits for "
            "them. With 1 microbatch, only one rank works at a time, and a rank is idle for 75.0% of the step. This "
            "share is the bubble. With 4 microbatches, rank 0 begins the next one while rank 1 works on the first, "
            "and the bubble is 42.9%."
        ),
        cost="Smaller parts. The batch is cut into 4, and each part must still be enough to keep a device busy.",
        start=_size("gpipe", 1),
        goal=_size("gpipe", 4),
        reached=lambda state, timeline: len(timeline.rows) >= 4 and timeline.num_microbatches >= 4,
    ),
    TourStep(
        title="Fill it",
        question="How many microbatches until the bubble is under 10%?",
        look=(
            "This is GPipe: each rank runs all of its forwards, then all of its backwards. The bubble stands above "
            "the rows."
        ),
        task="Move the slider of microbatches to the right until the bubble is under 10%.",
        answer=(
            "28. The idle time does not change: each rank waits for 3 forwards and 3 backwards, which take 9 here. "
            "The work grows, so the share of the idle time gets smaller. On R ranks with M microbatches, the bubble "
            "is (R - 1) / (M + R - 1). More ranks need more microbatches: 8 ranks need 64."
        ),
        cost=(
            "Memory. The curve below each row is the number of activations that the rank keeps for its backwards. "
            "With 28 microbatches, GPipe keeps 28 on every rank."
        ),
        start=_size("gpipe", 4),
        goal=_size("gpipe", 28),
        reached=lambda state, timeline: (
            timeline.name == "gpipe" and len(timeline.rows) >= 4 and timeline.makespan_bubble_ratio < UNDER_TEN
        ),
        more={"GPipe on 8 ranks with 64 microbatches": _size("gpipe", 64, 8)},
    ),
    TourStep(
        title="1F1B",
        question="What does 1F1B save, if not time?",
        look=(
            "GPipe again, with 8 microbatches. A rank keeps the activations of a microbatch from its forward to its "
            "backward, so at the end of the forwards it keeps those of all 8."
        ),
        task="Choose the schedule 1f1b, and compare the curves below the rows.",
        answer=(
            "Memory. 1f1b runs a backward as soon as there is one; then it runs one forward and one backward in turn, "
            "hence its name. A backward frees memory, so rank 0 keeps at most 4 activations where GPipe keeps 8, and "
            "rank 3 keeps 1. The time is the same: both take 33, with a bubble of 27.3%."
        ),
        cost="Nothing here. If transfers take time, 1f1b loses more than GPipe; a later step shows why.",
        start=_size("gpipe"),
        goal=_size("1f1b"),
        reached=_named("1f1b"),
        more={"GPipe and 1F1B side by side": _size("gpipe,1f1b")},
    ),
    TourStep(
        title="More microbatches",
        question="Can the bubble get under 10% in the memory of 4 activations?",
        look="1f1b with 8 microbatches keeps 4 activations on rank 0.",
        task="Move the slider of microbatches to the right, and watch the peak activations above the rows.",
        answer=(
            "Yes. With 28 microbatches the bubble is 9.7%, as in GPipe, but rank 0 still keeps 4 activations: as many "
            "as there are ranks. This is why 1f1b is the usual default."
        ),
        cost=(
            "A batch of 28 microbatches. If yours has only 8, the bubble must get smaller in another way. The next "
            "steps stay with 8."
        ),
        start=_size("1f1b"),
        goal=_size("1f1b", 28),
        reached=lambda state, timeline: (
            timeline.name == "1f1b" and len(timeline.rows) >= 4 and timeline.makespan_bubble_ratio < UNDER_TEN
        ),
    ),
    TourStep(
        title="Interleaving",
        question="Why does it help to cut the model into smaller stages?",
        look="1f1b with 8 microbatches takes 33. Rank 3 waits for 3 forwards until it can start.",
        task="Choose interleaved-1f1b. Then move the slider of chunks, the number of stages per rank, to 4.",
        answer=(
            "With 2 chunks the model is cut into 8 stages, which take half as long. Rank 0 has the first and the "
            "fifth; the fifth has a lighter colour. A microbatch goes through all ranks twice. Rank 3 now waits for 3 "
            "short forwards only, so the step takes 28.5 and the bubble is 15.8%. With 4 chunks it takes 26.25, and "
            "the bubble is 8.6%."
        ),
        cost=(
            "Transfers and memory. 1f1b sends 48 values between ranks in a step, 2 chunks send 112, and 4 chunks send "
            "240. Rank 0 keeps 5.5 activations with 2 chunks, not 4."
        ),
        start=_size("1f1b"),
        goal=_size("interleaved-1f1b", chunks=4),
        reached=lambda state, timeline: timeline.name == "interleaved-1f1b" and timeline.placement.chunks_per_rank > 1,
    ),
    TourStep(
        title="Transfers",
        question="What if transfers take time?",
        look=(
            "Three schedules on one time scale. Until now a value arrived at the next rank at once. The latency is "
            "the time from when it is sent until it arrives."
        ),
        task="Move the slider of latency to 0.5, then to 1. Which schedule loses the least?",
        answer=(
            "eager-1f1b. With a latency of 0.5 it takes 36, which is 3 more. 1f1b takes 41 instead of 33: a "
            "microbatch goes to the last rank and comes back as a backward, and meanwhile the rank has no other work "
            "in its order. eager-1f1b runs more forwards ahead, so there is work while values travel. "
            "interleaved-1f1b takes 35.5. With a latency of 1 it takes 46, more than the 39 of eager-1f1b, since each "
            "microbatch goes through the ranks twice."
        ),
        cost="Memory: with eager-1f1b, rank 0 keeps 7 activations, where 1f1b keeps 4.",
        start=_size(BESIDE),
        goal=_size(BESIDE, latency=0.5),
        reached=lambda state, timeline: state.prices.costs["latency"] >= 0.5,
    ),
    TourStep(
        title="Weight gradients",
        question="Where do the weight gradients go?",
        look=(
            "A backward does two things. I computes the gradient of the stage's input, for which the rank before is "
            "waiting. W computes the gradient of the stage's weights, for which no rank is waiting. In 1f1b, B is "
            "both."
        ),
        task="Choose the schedule zb-h1. It splits each backward into I and W.",
        answer=(
            "Into the gaps. I runs as soon as it can, so that the rank before gets its gradient early. W runs later, "
            "where the rank would be idle. The step takes 27 instead of 33, and the bubble is 11.1%: 3 of the 9 units "
            "of idle time are left."
        ),
        cost=(
            "The peak of 4 activations and the 48 transfers are those of 1f1b. But the layers must be able to compute "
            "their weight gradients later, and what W needs is kept until it has run."
        ),
        start=_size("1f1b"),
        goal=_size("zb-h1"),
        reached=_named("zb-h1"),
        more={"Both side by side": _size("1f1b,zb-h1")},
    ),
    TourStep(
        title="No weight gradients",
        question="Is zb-h1 always faster than 1f1b?",
        look=(
            "In zb-h1, the idle time at the start and at the end of a step is filled with W. Here W takes 1, as F and "
            "I do."
        ),
        task="Move the slider of the weight half (W) to 0.",
        answer=(
            "No. If W takes no time, there is nothing to fill the gaps with: zb-h1 and 1f1b both take 22, and the "
            "bubble is 27.3%. The longer W is, the more idle time it fills: with a W of 0.5, 4.5 of idle time is "
            "left, and with a W of 1, only 3. A W that is longer than F fills no more: with a W of 2 it is still 3."
        ),
        cost=(
            "Some layers cannot compute their weight gradients later. Their W is part of I, so the gain is as small "
            "as here. Linear, convolution and embedding layers can."
        ),
        start=_size("zb-h1"),
        goal=_size("zb-h1", backward_weight=0),
        reached=lambda state, timeline: timeline.name == "zb-h1" and state.prices.costs["backward_weight"] == 0,
        more={
            "zb-h1 with a W of 2": _size("zb-h1", backward_weight=2),
            "Both without W, side by side": _size("1f1b,zb-h1", backward_weight=0),
        },
    ),
    TourStep(
        title="Zero bubble",
        question="Can the other gaps be closed, too?",
        look="zb-h1 has 3 of idle time left. Before, smaller stages helped.",
        task="Choose the schedule zb-v.",
        answer=(
            "Nearly. zb-v cuts the model into 8 stages and places them like a V: down from rank 0 to rank 3, then up "
            "again. So rank 0 has the first and the last stage, and rank 3 has both in the middle. The step takes "
            "25.5, and the bubble is 5.9%. What is left is the start: the last rank waits for 3 short forwards, which "
            "take 1.5. From its first action to its last, no rank is idle: the bubble of the span is 0.0%."
        ),
        cost=(
            "96 transfers, not 48. Every rank keeps 4 activations, where in 1f1b only rank 0 does. If F, I and W do "
            "not take equally long, there are gaps again."
        ),
        start=_size("zb-h1"),
        goal=_size("zb-v"),
        reached=_named("zb-v"),
        more={"zb-v with a W of 0.5": _size("zb-v", backward_weight=0.5)},
    ),
    TourStep(
        title="Less memory",
        question="How fast is a step in half of the memory?",
        look=(
            "zb-v keeps 4 activations on each rank. Its two relatives, v-half and v-min, start their microbatches "
            "later."
        ),
        task="Choose the schedule v-half, then v-min, and watch the peak activations.",
        answer=(
            "v-half keeps 3 activations and takes 26.5. v-min keeps 2, half of what 1f1b keeps, and takes 29: more "
            "than zb-v, but still less than the 33 of 1f1b. So you choose between time, memory and transfers: no "
            "schedule is best in all three. This was the tour. Now draw any schedule, and change its costs to yours."
        ),
        cost="Time: 1 for v-half and 3.5 for v-min, compared with zb-v.",
        start=_size("zb-v"),
        goal=_size("v-min"),
        reached=lambda state, timeline: (
            len(timeline.rows) >= 4 and timeline.num_microbatches >= 8 and max(timeline.peak_activations) <= 2
        ),
        more={"All three side by side": _size("zb-v,v-half,v-min")},
    ),
)
"""The steps, in their order."""
