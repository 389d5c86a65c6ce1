/* Bar: lets the bar above the timelines, keys, the window's size and the printer change a page. */

import {focusOn, listenToKeys} from "./keys.js";
import {by} from "./page.js";
import {makeMinimap} from "./minimap.js";
import {makePlayer} from "./play.js";
import {unpoint} from "./pointers.js";

export function listenToBar(page) {
  makePlayer(page);
  makeMinimap(page);
  listenToKeys(page, () => { unpoint(page); page.unplay(); });
  by("path").addEventListener("change", (event) => page.showPath(event.target.checked));
  by("closer").addEventListener("click", () => page.zoom(1 / 1.5));
  by("farther").addEventListener("click", () => page.zoom(1.5));
  by("whole").addEventListener("click", () => page.showAll());
  by("forget").addEventListener("click", () => page.follow(null));
  by("colour").addEventListener("change", (event) => page.colourBy(event.target.value));
  listenToFind(page);
  new ResizeObserver(() => page.repaint()).observe(document.querySelector("main"));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => page.repaint());
  for (const [name, printing] of [["beforeprint", true], ["afterprint", false]]) {
    window.addEventListener(name, () => {
      document.documentElement.classList.toggle("printing", printing);
      page.density = printing ? 3 : null;
      page.paint();
    });
  }
}

/** What is typed is found; Enter goes to the next block, with Shift to the one before. */
function listenToFind(page) {
  by("find").addEventListener("input", (event) => page.find(event.target.value, true));
  by("find").addEventListener("change", (event) => page.find(event.target.value));
  by("find").addEventListener("blur", () => { page.held = null; page.repaint(); });
  by("find").addEventListener("keydown", (event) => {
    if (event.key !== "Enter") return;
    event.preventDefault();
    const found = page.nextFound(event.shiftKey ? -1 : 1);
    if (found) focusOn(page, page.charts[found.number], found.block, true);
  });
}
