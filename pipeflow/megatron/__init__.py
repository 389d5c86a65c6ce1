"""The names of Megatron-LM's labs: `pipeflow.megatron.x` replaces `megatron.x`. Each is one of pipeflow's own classes
or functions, or a thin adapter of it; `table.py` says which. Megatron-LM's tensors are (sequence, batch, hidden); here
the batch comes first.
"""

from __future__ import annotations

from pipeflow.megatron.table import FACE

FACE.install()
