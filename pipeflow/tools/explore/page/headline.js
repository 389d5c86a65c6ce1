/* Headline: the conclusion above the timelines, and the slider that wipes from one timeline to the other, which lie on
 * each other. The sentences come from Python. */

import {namesIn, showNames} from "./beside.js";
import {by} from "./page.js";

export function showHeadline({link, page, shown}) {
  const wipe = by("wipe");
  let told = null; // what Python said about the timelines that are shown

  /** Lays the timelines on each other; `before` is visible to the left of the edge. */
  const lay = () => {
    const on = told?.sides !== null && page.charts.length === 2 && link.get("wipe") !== "";
    by("charts").classList.toggle("wiped", on);
    by("apart").hidden = by("edge").hidden = !on;
    wipe.value = link.get("wipe") || (told?.first === "before" ? 100 : 0);
    const {left, width} = page.charts[0]?.place ?? {left: 0, width: 0};
    const lengths = {left, width, edge: left + (width * wipe.value) / 100};
    for (const [name, length] of Object.entries(lengths)) by("shown").style.setProperty(`--${name}`, `${length}px`);
  };
  const move = (moving) => {
    const names = [...namesIn(link), told.other];
    showNames(link, names.slice(0, 2), {wipe: String(Math.round(wipe.value))}, {moving});
  };
  wipe.addEventListener("input", () => move(true));
  wipe.addEventListener("change", () => move(false));
  by("apart").addEventListener("click", () => link.set({wipe: ""}));
  page.painters.push((_, chart) => { if (chart === page.charts[0]) lay(); });
  link.listen(() => page.repaint());
  shown.listen(({headline}) => {
    told = headline;
    by("conclusion").textContent = headline.idle;
    by("because").textContent = headline.said;
    by("compare").classList.toggle("none", headline.sides === null);
    for (const side of ["before", "after"]) by(side).textContent = headline.sides?.[side] ?? "";
    const isAfter = (number) => (number === 0) === (told.first === "after");
    page.charts.forEach(({element}, number) => element.parentElement.classList.toggle("after", isAfter(number)));
  });
}
