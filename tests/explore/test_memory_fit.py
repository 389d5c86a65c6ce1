"""What does not fit into memory, said at the timeline."""

from __future__ import annotations

import pytest

from pipeflow.tools.explore.views import model, plan
from tests.browser import MARKS
from tests.explore.explorer import Explorer

RED = """
const canvas = document.querySelector(".lanes");
const [wide, high] = [canvas.width, canvas.height];
const {data} = canvas.getContext("2d").getImageData(0, 0, wide, high);
const red = new Set();
for (let at = 0; at < data.length; at += 4) {
  const isRed = data[at] > 170 && data[at + 1] < 60 && data[at + 2] < 80 && data[at + 3] > 200;
  if (isRed) red.add(Math.floor(at / wide / high));
}
return [...red].sort();
"""


def test_the_ranks_above_their_caps_and_the_worst_of_them() -> None:
    def found(**fields: str) -> list[object]:
        return list(plan(fields)["misfits"])

    [one] = found(schedule="1f1b", memory_cap="2.5")
    said = "Does not fit: 2 of 4 ranks are above the memory cap; worst: rank 0, 4 activations of 2.5."
    assert one == {"ranks": [0, 1], "said": said}
    assert found(schedule="1f1b,gpipe", memory_cap="4")[0] is None
    [one] = found(schedule="1f1b", memory_cap="4,3,2,0.5")
    assert one["ranks"] == [3]  # type: ignore[index]  # it is not None
    assert found(schedule="1f1b") == [None]


def test_the_ranks_that_need_more_than_their_device_has() -> None:
    fields = {"model": "gpt3-175b", "ranks": "8", "tensor": "8", "microbatches": "16"}
    [misfit] = model({**fields, "tensor": "4"})["misfits"]
    assert misfit["ranks"] == [*range(8)]
    assert "8 of 8 ranks are above the room on a100-80gb; worst: rank 0, " in misfit["said"]
    assert model({**fields, "data": "8", "zero": "1", "checkpoint": "full"})["misfits"] == [None]


class TestOnThePage:
    pytestmark = MARKS

    @pytest.mark.exhaustive
    def test_it_is_said_below_the_heading_and_red_at_the_ranks_alone(self, explorer: Explorer) -> None:
        explorer.open(schedule="1f1b", memory_cap="2.5", path="1")
        misfit = explorer.find("#charts .misfit")
        assert misfit.text.startswith("Does not fit: 2 of 4 ranks")
        assert explorer.find(".lanes").get_dom_attribute("aria-describedby") == f"{misfit.get_property('id')} keys"
        assert explorer.browser.execute_script(RED) == [0, 1]  # the critical path goes through all ranks
        explorer.set("memory_cap", 4)
        assert explorer.texts(".misfit") == []
        assert explorer.browser.execute_script(RED) == []
        explorer.set("ranks", 8).set("model", "gpt3-175b")
        assert "the room on a100-80gb" in explorer.text(".misfit", -1)
