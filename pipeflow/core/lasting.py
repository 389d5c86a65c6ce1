"""Lasting: values that serve all actions of their stage in a row, such as whole weights, from the action that makes
them to the one that ends them. Must not contain: checks of a schedule.
"""

from __future__ import annotations

from collections.abc import Iterable

from pipeflow.core.action import Action, Entry
from pipeflow.core.dataflow import DATAFLOW, LASTING, MAKERS, Content, Value

Lasting = tuple[Content, int]  # content and stage

MAKING = {kind: content for content in LASTING for kind in MAKERS[content]}
"""The kinds of action that make a lasting content."""
ENDING = {kind: content for content in LASTING for kind, flow in DATAFLOW.items() if (content, 0) in flow.needs}
"""The kinds of action that end one."""
HANDLING = frozenset(MAKING) | frozenset(ENDING)
"""Both."""


def first_uses(actions: Iterable[Action]) -> dict[Action, Value]:
    """Per action of a row that is the first to run within a lasting value, this value. The action waits for it, and
    leaves it to the actions after it, which need not wait.
    """
    fresh: dict[Lasting, Value] = {}
    found: dict[Action, Value] = {}
    for action in actions:
        kind, stage = action.kind, action.stage
        if kind in MAKING:
            fresh[MAKING[kind], stage] = Value(MAKING[kind], stage, action.microbatch)
        elif kind in ENDING:
            fresh.pop((ENDING[kind], stage), None)
        elif (within := DATAFLOW[kind].within) and (value := fresh.pop((within, stage), None)):
            found[action] = value
    return found


def handles(entry: Entry, content: Content) -> bool:
    """Whether an entry of a row makes or ends a lasting content."""
    return isinstance(entry, Action) and content in (MAKING.get(entry.kind), ENDING.get(entry.kind))
