"""Imports the library transformers when it is first needed. Must not contain: uses of it."""

from __future__ import annotations

from typing import Any

from pipeflow.core.errors import UsageError
from pipeflow.core.extras import install


def library() -> Any:
    """Returns the package transformers. Raises UsageError if it is not installed."""
    try:
        import transformers
    except ImportError as error:
        raise UsageError(
            f"this needs the package transformers: {install('huggingface')} (importing it failed with: {error})"
        ) from error
    return transformers
