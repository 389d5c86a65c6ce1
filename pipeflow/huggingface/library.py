"""The library transformers, imported when it is first needed. What must not live here: what is done with it."""

from __future__ import annotations

from typing import Any

from pipeflow.core.errors import UsageError


def library() -> Any:
    """The package transformers. Raises UsageError where it is not installed."""
    try:
        import transformers
    except ImportError as error:
        raise UsageError(
            "this needs the package transformers: pip install 'pipeflow[huggingface]' "
            f"(importing it failed with: {error})"
        ) from error
    return transformers
