"""The names of ColossalAI's tutorials: `pipeflow.colossalai.x` replaces `colossalai.x`. Each is one of pipeflow's own
classes or functions, or a thin adapter of it; `table.py` says which.
"""

from __future__ import annotations

from pipeflow.colossalai.table import FACE

FACE.install()
