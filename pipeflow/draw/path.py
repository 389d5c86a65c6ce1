"""The critical path in few lines: what the makespan consists of, rank by rank, what repeats said once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple, final

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from pipeflow.core.action import Action
from pipeflow.core.span import Cause
from pipeflow.core.timeline import Timeline
from pipeflow.draw.gantt import painter_for
from pipeflow.draw.layout import num_chunks
from pipeflow.draw.measures import Unit, heading
from pipeflow.draw.painters import Painter

SHOWN = 6  # actions of one stretch that are written out


class Stretch(NamedTuple):
    """Actions of the path that follow each other on one rank. The first one began `wait` after what it waited for."""

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
        """What the first action waited for."""
        _, after, value = self.causes[0]
        if after is None:
            return ""
        return f"{value.content.value} from rank {after.rank}" if value else str(after.action)

    @property
    def shape(self) -> tuple[object, ...]:
        """What it has in common with the same stretch for other microbatches."""
        return self.rank, self.reason, tuple((action.kind, action.stage) for action in self.actions)


@final
@dataclass(frozen=True, slots=True)
class CriticalPath:
    """Lists the chain of actions that the makespan consists of: no action of it could begin before the one before it
    had ended. Shortening anything else leaves the makespan as it is.
    """

    timeline: Timeline
    unit: str = ""
    factor: float = 1.0

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        unit = Unit(self.unit, self.factor)
        computing, waiting = computing_and_waiting(self.timeline)
        painter = painter_for(num_chunks(self.timeline), console, options)
        yield Text(f"critical path of {heading(self.timeline)}", "bold")
        plain = Unit("", self.factor)
        at = f"at {self.unit}".rstrip()
        rows = [(at, "waited" * bool(waiting), "after", "rank", Text("runs"))]
        for stretch, copies in folded(stretches(self.timeline)):
            start, wait = plain.text(stretch.causes[0].span.start), plain.text(stretch.wait) if stretch.wait else ""
            if copies is None:
                rows.append((start, wait, stretch.reason, str(stretch.rank), _runs(stretch, painter)))
            else:
                rows.append(("", "", "", "", Text(copies, "bright_black")))
        widths = [max(len(row[column]) for row in rows) for column in range(4)]
        for index, (start, wait, reason, rank, runs) in enumerate(rows):
            columns = [f"{start:>{widths[0]}}", f"{wait:>{widths[1]}}", f"{reason:{widths[2]}}", f"{rank:>{widths[3]}}"]
            head = "  ".join(column for column in columns if column)
            yield _line(head, runs, "" if index else "bright_black")
        yield Text(f"computing {unit.text(computing)}, waiting {unit.text(waiting)}")


def _line(head: str, runs: Text, style: str) -> Text:
    line = Text.assemble((head + "  ", style), runs, no_wrap=True, overflow="ignore")
    line.rstrip()
    return line


def computing_and_waiting(timeline: Timeline) -> tuple[float, float]:
    """The parts of the makespan on the critical path."""
    path = timeline.critical_path()
    computing = sum(cause.span.end - cause.span.start for cause in path)
    waiting = timeline.makespan - computing
    return computing, waiting if waiting > 1e-9 * timeline.makespan else 0.0


def stretches(timeline: Timeline) -> list[Stretch]:
    """The critical path, cut where it goes from rank to rank."""
    found = []
    for _, causes in groupby(timeline.critical_path(), key=lambda cause: cause.span.rank):
        chain = tuple(causes)
        span, after, _ = chain[0]
        wait = span.start - (after.end if after else 0.0)
        found.append(Stretch(chain, wait if wait > 1e-9 * timeline.makespan else 0.0))
    return found


def folded(path: list[Stretch]) -> Iterator[tuple[Stretch, str | None]]:
    """Each stretch and None; and, for several that only repeat those before them, one with text that says so."""
    shapes = [stretch.shape for stretch in path]
    position = 0
    while position < len(path):
        period, times = _repeats(shapes, position)
        yield from ((stretch, None) for stretch in path[position : position + period])
        position += period
        if times:
            last = path[position + period * times - 1].actions[-1]
            yield path[position], f"... the same {times} time{'s' * (times > 1)} more, to {last}"
            position += period * times


def _repeats(shapes: list[tuple[object, ...]], start: int) -> tuple[int, int]:
    """The period that begins at `start`, and how often it comes again: the one that saves the most lines."""
    best = (1, 0)
    for period in range(1, min(12, (len(shapes) - start) // 2) + 1):
        times = 0
        while shapes[start : start + period] == shapes[start + period * (times + 1) : start + period * (times + 2)]:
            times += 1
        if times and period * times - 1 > best[0] * best[1] - 1 and period * times > 1:
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
