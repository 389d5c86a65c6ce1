"""Sequence parallelism: the mode that is supported, and why others are not."""

from __future__ import annotations

from pipeflow.core.errors import UsageError

MODE = "split_gather"
_CONTEXTS = "it splits the context of an attention, which is always whole here"
_OTHERS = {"all_to_all": "tensor ranks have no all-to-all", "ring": _CONTEXTS, "ring_attn": _CONTEXTS}


def mode_of(mode: str | None, *, is_enabled: bool, overlaps: bool) -> str | None:
    """Returns the mode of a ShardConfig: "split_gather", or None if sequences stay whole.

    Raises UsageError for another mode, and for a mode or an overlap if it is not enabled.
    """
    if mode in _OTHERS:
        raise UsageError(f"sequence_parallelism_mode={mode!r} is not supported: {_OTHERS[mode]}; use {MODE!r}")
    if mode not in (None, MODE):
        raise UsageError(f"sequence_parallelism_mode must be {MODE!r}, got {mode!r}")
    if not is_enabled and (mode or overlaps):
        raise UsageError("sequence_parallelism_mode and enable_sequence_overlap need enable_sequence_parallelism=True")
    return MODE if is_enabled else None


def require_whole(mode: str | None) -> None:
    """Raises UsageError if sequences should be split, for models without a policy."""
    if mode is not None:
        raise UsageError(
            "enable_sequence_parallelism=True needs a policy: a model's own attention computes with the length of its "
            "input, so rules cannot split sequences without changing results. Let a policy replace layers by those of "
            f"shardformer.layer with seq_parallel_mode={MODE!r}"
        )
