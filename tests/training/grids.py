"""The layouts of grids of tensor ranks that tests train under."""

from __future__ import annotations

from typing import Any

GRIDS: dict[str, dict[str, Any]] = {
    "2d": {"tensor": 4, "tensor_mode": "2d"},
    "2.5d": {"tensor": 8, "tensor_mode": "2.5d", "tensor_depth": 2},
    "3d": {"tensor": 8, "tensor_mode": "3d"},
}
