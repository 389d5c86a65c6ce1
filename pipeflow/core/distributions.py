"""Distributions: others on the public index install an import of the same name, into the same folder. Must not contain:
slow imports, since it runs whenever pipeflow is imported.
"""

from __future__ import annotations

import os
import warnings

OWN = "pipeflow-torch"


def warn_of_others(folder: str) -> None:
    """Warns if another distribution in `folder`, which holds the package, has files of an import `pipeflow` as well."""
    if others := others_in(folder):
        names = ", ".join(others)
        warnings.warn(
            f"{names} and {OWN} each install the import pipeflow, in {folder}, so that files of one may have replaced "
            f"those of the other: pip uninstall {' '.join(others)} {OWN}, then pip install {OWN}",
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
        if entry.endswith(".dist-info") and name.startswith("pipeflow") and name != OWN:
            try:
                with open(os.path.join(folder, entry, "RECORD"), encoding="utf-8", errors="replace") as record:
                    if any(line.startswith("pipeflow/") for line in record):
                        found.append(name)
            except OSError:
                continue
    return found
