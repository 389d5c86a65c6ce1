"""Products of measured shapes, and between them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipeflow import Cluster
from pipeflow.core.errors import UsageError
from pipeflow.planning.cluster import ShapeTime, longer
from pipeflow.planning.efficiency import PUBLISHED
from pipeflow.planning.rates import Rates
from pipeflow.planning.work import MatrixProduct

TABLE = (ShapeTime(512, 512, 2.0), ShapeTime(2048, 512, 1.0), ShapeTime(512, 2048, 1.2))
A100 = Cluster.of("a100-80gb")


def test_a_measured_shape_takes_what_was_measured_and_others_something_between() -> None:
    assert [longer(TABLE, each.rows, each.shortest) for each in TABLE] == [2.0, 1.0, 1.2]
    assert longer((), 100, 100) == 1.0
    assert longer(TABLE[:2], 1024, 512) == pytest.approx(2**0.5)  # as near to one as to the other
    assert 1.0 < longer(TABLE, 2000, 512) < 1.1
    assert 1.0 < longer(TABLE, 1e5, 1e5) < 2.0


def test_products_on_a_measured_cluster_take_longer_where_it_says_so() -> None:
    product = MatrixProduct(512, 2048, 512)
    usual, known = (Rates(each, PUBLISHED, "bf16").product(product) for each in (A100, replace(A100, shapes=TABLE)))
    assert known == pytest.approx(2 * usual)


def test_a_cluster_file_keeps_shapes(tmp_path: Path) -> None:
    cluster = replace(A100, shapes=TABLE)
    cluster.save(tmp_path / "cluster.json")
    assert Cluster.load(tmp_path / "cluster.json") == cluster
    wrong: Any
    for wrong in ([[1, 2]], [[1, 2, 0]], [[1, 2, "3"]]):
        with pytest.raises(UsageError, match="shapes must have rows of three positive numbers"):
            replace(A100, shapes=wrong)
    text = (tmp_path / "cluster.json").read_text(encoding="utf-8")
    (tmp_path / "cluster.json").write_text(text[: text.index('"shapes"')] + '"shapes": 3}', encoding="utf-8")
    with pytest.raises(UsageError, match="shapes must be a list of rows, got 3"):
        Cluster.load(tmp_path / "cluster.json")
