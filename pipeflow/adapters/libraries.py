"""Optional libraries: imported when they are first needed, with one error that says how a missing one is installed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from pipeflow.core.distributions import install
from pipeflow.core.errors import UsageError


@contextmanager
def needed(package: str, extra: str | None = None, who: str = "this") -> Iterator[None]:
    """Raises UsageError if an import inside the `with` block fails.

    Args:
        package: name of the package that is imported there.
        extra: the extra of pipeflow that installs it; None if it is installed by its own name.
        who: what needs it.
    """
    try:
        yield
    except ImportError as error:
        how = f"pip install {package}" if extra is None else install(extra)
        raise UsageError(f"{who} needs the package {package}: {how} (importing it failed with: {error})") from error


def transformers_library() -> Any:
    """Returns the package transformers. Raises UsageError if it is not installed."""
    with needed("transformers", "huggingface"):
        import transformers
    return transformers
