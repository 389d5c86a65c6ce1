"""Trace: the timeline of a step in traces that the reader dropped onto the page, one text per rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pipeflow.analysis.executed import executed_schedule
from pipeflow.explore.state import texts_in
from pipeflow.schedules.registry_names import recognised
from pipeflow.traces.explanation import median_step, recorded_steps
from pipeflow.traces.files import read_text_of


def trace(fields: Mapping[str, str]) -> dict[str, Any]:
    """The step of median length as the text of a timeline, which the page then opens like any other.

    Raises UsageError for traces that show no whole step on all ranks.
    """
    steps, _ = recorded_steps([read_text_of(text, name) for name, text in texts_in(fields.get("files", "")).items()])
    step = median_step(steps)
    names = recognised(executed_schedule(step))
    return {"timeline": replace(step, name=names[0] if names else "own order").to_json()}
