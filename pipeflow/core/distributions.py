"""Distributions: how pipeflow and its optional parts are installed, and what else installs an import of the same name.
Must not contain: slow imports, since it runs whenever pipeflow is imported.
"""

from __future__ import annotations

import os
import warnings

DISTRIBUTION = "pipeflow-torch"
"""The name that pip knows pipeflow by. On the public index "pipeflow" is another package."""


def warn_of_others(folder: str) -> None:
    """Warns if another distribution in `folder`, which holds the package, has files of an import `pipeflow` as well."""
    if others := others_in(folder):
        warnings.warn(
            f"{', '.join(others)} and {DISTRIBUTION} each install the import pipeflow, in {folder}, so that files of "
            f"one may have replaced those of the other: pip uninstall {' '.join(others)} {DISTRIBUTION}, then pip "
            f"install {DISTRIBUTION}",
            RuntimeWarning,
            stacklevel=3,
        )


def others_in(folder: str) -> list[str]:
    """The names of other distributions in a folder that have files in `pipeflow/`."""
    try:
        entries = sorted(os.listdir(folder))
    except OSError:
        return []
    found = []
    for entry in entries:
        name = entry.partition("-")[0].replace("_", "-").lower()
        if entry.endswith(".dist-info") and name.startswith("pipeflow") and name != DISTRIBUTION:
            try:
                with open(os.path.join(folder, entry, "RECORD"), encoding="utf-8", errors="replace") as record:
                    if any(line.startswith("pipeflow/") for line in record):
                        found.append(name)
            except OSError:
                continue
    return found


def install(extra: str) -> str:
    """The command that adds an extra to the pipeflow that is installed."""
    return f"pip install '{DISTRIBUTION}[{extra}]'"
