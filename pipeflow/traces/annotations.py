"""Annotations: which actions the names of ranges stand for. Must not contain: when they computed."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from pipeflow.core.action import Kind, Pair, actions_of, parse_entry
from pipeflow.core.dataflow import DATAFLOW
from pipeflow.core.errors import UsageError

KINDS = {
    "f": Kind.F,
    "forward": Kind.F,
    "fwd": Kind.F,
    "b": Kind.B,
    "backward": Kind.B,
    "bwd": Kind.B,
    "i": Kind.I,
    "dgrad": Kind.I,
    "w": Kind.W,
    "wgrad": Kind.W,
}
KNOWN = [
    # torch.distributed.pipelining's ScheduleGPipe
    r"(?P<kind>Forward|Backward) (?P<microbatch>\d+)",
    # Megatron-core's steps, timers and spans, and DeepSpeed's instructions
    r"(?:megatron\.core\.pipeline_parallel\.schedules\.)?(?P<kind>forward|backward)[-_](?:step|compute|pass)",
    r"(?:_exec_)?(?P<kind>Forward|Backward)(?:Pass|_pass)(?:\(.*\))?",
]


class Named(NamedTuple):
    """An action as an annotation names it.

    Attributes:
        kind, stage, microbatch: None where the name does not say it.
        partner: whether it is one of a pair.
    """

    kind: Kind | None
    stage: int | None = None
    microbatch: int | None = None
    partner: Named | None = None


class Names:
    """Reads names of ranges: those of `pattern`, a regular expression with the groups kind, stage and microbatch, each
    of them optional; or those that engines are known to write. Raises UsageError for a pattern that cannot work.

    Attributes:
        is_own: whether a pattern was given.
    """

    def __init__(self, pattern: str | None = None) -> None:
        try:
            self._patterns = [re.compile(each) for each in ([pattern] if pattern else KNOWN)]
        except re.error as error:
            raise UsageError(f"--names {pattern!r} is not a regular expression: {error}") from None
        self.is_own = pattern is not None
        if pattern and not {"kind", "stage", "microbatch"} & set(self._patterns[0].groupindex):
            raise UsageError(
                f"--names {pattern!r} has none of the groups (?P<kind>...), (?P<stage>...), (?P<microbatch>...)"
            )

    def read(self, name: str) -> list[Named]:
        """The actions of a range: one, the two of a pair, or none."""
        if not self.is_own and name.startswith("PP:"):
            return [*_of_torch(name[3:])]
        for pattern in self._patterns:
            if match := (pattern.search if self.is_own else pattern.fullmatch)(name):
                given = match.groupdict()
                word = given.get("kind")
                kind = KINDS.get(word.lower()) if word else None
                if kind is not None or not word:
                    return [Named(kind, _number(given.get("stage")), _number(given.get("microbatch")))]
        return []


def _number(text: str | None) -> int | None:
    return int(text) if text and text.isdecimal() else None


def _of_torch(text: str) -> Iterator[Named]:
    """The actions of an entry of torch's table; none for its communication."""
    try:
        entry = parse_entry(text)
    except UsageError:
        return
    actions = (each for each in actions_of(entry) if not DATAFLOW[each.kind].joint)
    named = [Named(each.kind, each.stage, each.microbatch) for each in actions]
    if isinstance(entry, Pair):
        named = [each._replace(partner=other) for each, other in zip(named, reversed(named), strict=True)]
    yield from named
