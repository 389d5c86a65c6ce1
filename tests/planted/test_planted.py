"""The faults that are planted, and the choice of the tests that `make test` runs."""

from __future__ import annotations

import ast
from pathlib import Path

from tests.planted.choice import Record, left_out
from tests.planted.faults import faults_of

CODE = '''def function(a, b):
    """Text that is not code: 1 < 2."""
    if a < b and not a:
        raise ValueError("an error may say 1 < 2")
    print(a, b)
    return a + 1
'''


def test_each_fault_is_a_change_of_code_that_python_reads(tmp_path: Path) -> None:
    (tmp_path / "code.py").write_text(CODE, encoding="utf-8")
    source = CODE.encode()
    found = list(faults_of(tmp_path / "code.py", tmp_path))
    assert {fault.told(source).partition(": ")[2] for fault in found} == {
        "a < b and not a -> (a < b or not a)",
        "a < b -> (a <= b)",
        "not a -> (a)",
        "print(a, b) -> pass",
        "print(a, b) -> (print(b, a))",
        "return a + 1 -> return None",
        "a + 1 -> (a - 1)",
        "1 -> (2)",
    }
    for fault in found:
        assert ast.dump(ast.parse(fault.planted(source))) != ast.dump(ast.parse(CODE))


def test_short_tests_stay_and_of_the_others_those_that_cover_more(tmp_path: Path) -> None:
    record = Record(tmp_path)
    record.seconds = {"short": 0.1, "wide[1]": 10, "wide[2]": 10, "narrow": 10, "same": 10}
    covered = {"short": range(3), "wide[1]": range(20), "wide[2]": range(20), "narrow": range(20, 25), "same": range(3)}
    for test, lines in covered.items():
        for line in lines:
            record.tests["file", line].add(test)
    assert left_out(record, 10.1) == ["narrow", "same", "wide[2]"]
    assert left_out(record, 15) == ["narrow", "same"]
    assert left_out(record, 100) == ["same"]  # others run its lines often enough
