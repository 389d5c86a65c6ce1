"""The critical path in a few lines: the parts of the makespan, rank by rank, with repetitions folded."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple, final

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from pipeflow.core.action import Action
from pipeflow.core.analysis.idle_time import Cause, critical_path
from pipeflow.core.analysis.measures import path_times
from pipeflow.core.text import printable
from pipeflow.core.timeline import Timeline
from pipeflow.draw.captions import Unit, heading
from pipeflow.draw.gantt import Painter, painter_for
from pipeflow.draw.lane_times import num_chunks

SHOWN = 4  # how many actions of one stretch are written out


class Stretch(NamedTuple):
    """Actions of the path that follow each other on one rank.

    Attributes:
        causes: the actions with their causes, in order.
        wait: how long after its cause the first action started.
    """

    causes: tuple[Cause, ...]
    wait: float

    @property
    def rank(self) -> int:
        return self.causes[0].span.rank

    @property
    def actions(self) -> list[Action]:
        return [cause.span.action for cause in self.causes]

    @property
    def reason(self) -> str:
        """The value or action that the first action waited for, as text."""
        _, after, value = self.causes[0]
        if after is None:
            return ""
        return f"{value.content.value} from rank {after.rank}" if value else str(after.action)

    @property
    def shape(self) -> tuple[object, ...]:
        """A key that is equal for the same stretch of another microbatch."""
        return self.rank, self.reason, tuple((action.kind, action.stage) for action in self.actions)


@final
@dataclass(frozen=True, slots=True)
class CriticalPath:
    """Lists the chain of actions that makes up the makespan: each of them could start only when the one before it had
    ended. Shortening any other action leaves the makespan as it is. For rich's `print`.

    Attributes:
        timeline: the timeline.
        unit, factor: times are written multiplied by `factor` and followed by `unit`. Default: a readable unit for
            timelines in seconds.
    """

    timeline: Timeline
    unit: str = ""
    factor: float = 1.0

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        unit = Unit.of([self.timeline], self.unit, self.factor)
        by_rank, beside, waiting = path_times(self.timeline)
        painter = painter_for(num_chunks(self.timeline), console, options)
        yield Text(f"critical path of {printable(heading(self.timeline))}", "bold")
        at = f"at {unit.name}".rstrip()
        titles = at, "waited" * bool(waiting), "after", "rank", Text("runs")
        folds = folded(stretches(self.timeline))
        rows = [([_row(stretch, painter, unit.factor) for stretch in fold.stretches], fold) for fold in folds]
        every = [titles, *(row for written, _ in rows for row in written)]
        widths = [max(len(row[column]) for row in every) for column in range(4)]
        yield _line(titles, widths, "bright_black")
        for written, fold in rows:
            yield from (_line(row, widths, "") for row in written)
            if fold.times:
                again = f"... the same {fold.times} time{'s' * (fold.times > 1)} more, to {fold.last}"
                yield Text(" " * (sum(widths[:2]) + 2 + 2 * bool(waiting)) + again, "bright_black")
        others = [f"{stream} {unit.text(time)}" for stream, time in beside.items() if time]
        yield Text(", ".join([f"computing {unit.text(sum(by_rank))}", *others, f"waiting {unit.text(waiting)}"]))


Row = tuple[str, str, str, str, Text]  # all but the last one are aligned


def _row(stretch: Stretch, painter: Painter, factor: float) -> Row:
    start, wait = (f"{time * factor:.6g}" for time in (stretch.causes[0].span.start, stretch.wait))
    return start, wait if stretch.wait else "", stretch.reason, str(stretch.rank), _runs(stretch, painter)


def _line(row: Row, widths: list[int], style: str) -> Text:
    aligned = [f"{text:{sign}{width}}" for text, sign, width in zip(row[:4], ">><>", widths, strict=True)]
    line = Text("  ".join(filter(None, aligned)) + "  ", style, no_wrap=True, overflow="ignore")
    line.append_text(row[4])
    line.rstrip()
    return line


def stretches(timeline: Timeline) -> list[Stretch]:
    """The critical path, cut where it changes rank."""
    found, least = [], 1e-9 * timeline.makespan
    for _, causes in groupby(critical_path(timeline), key=lambda cause: cause.span.rank):
        chain = tuple(causes)
        span, after, _ = chain[0]
        wait = span.start - (after.end if after else 0.0)
        found.append(Stretch(chain, wait if wait > least else 0.0))
    return found


class Fold(NamedTuple):
    """Stretches that are written out once.

    Attributes:
        stretches: the stretches.
        times: how many times they repeat, with other microbatches.
        last: the last action of all repetitions.
    """

    stretches: tuple[Stretch, ...]
    times: int
    last: Action


def folded(path: list[Stretch]) -> Iterator[Fold]:
    """The path with repetitions folded."""
    shapes = [stretch.shape for stretch in path]
    position = 0
    while position < len(path):
        period, times = _repeats(shapes, position)
        end = position + period * (1 + times)
        yield Fold(tuple(path[position : position + period]), times, path[end - 1].actions[-1])
        position = end


def _repeats(shapes: list[tuple[object, ...]], start: int) -> tuple[int, int]:
    """The period that starts at `start`, and how often it repeats: the one that saves the most lines."""
    best = (1, 0)
    for period in range(1, min(12, (len(shapes) - start) // 2) + 1):
        times = 0
        while shapes[start : start + period] == shapes[start + period * (times + 1) : start + period * (times + 2)]:
            times += 1
        if period * times > max(best[0] * best[1], 1):
            best = period, times
    return best


def _runs(stretch: Stretch, painter: Painter) -> Text:
    actions = stretch.actions
    text = Text()
    for index, action in enumerate(actions):
        if len(actions) > SHOWN and index == SHOWN - 2:
            text.append("... ", "bright_black")
        if len(actions) <= SHOWN or index < SHOWN - 2 or index == len(actions) - 1:
            text.append(*painter.word(action)).append(" ")
    if len(actions) > SHOWN:
        text.append(f"({len(actions)} actions)", "bright_black")
    return text
