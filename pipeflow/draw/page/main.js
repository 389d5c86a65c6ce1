/* Main: makes the page from the data in the document, and lets keys and pointers change it. */

import {read} from "./data.js";
import {listenToKeys} from "./keys.js";
import {Page, by} from "./page.js";
import {listenToPointers, unpoint} from "./pointers.js";

const page = new Page(read(JSON.parse(by("data").textContent)));
listenToPointers(page);
listenToKeys(page, () => unpoint(page));
by("path").addEventListener("change", (event) => page.showPath(event.target.checked));
by("closer").addEventListener("click", () => page.zoom(1 / 1.5));
by("farther").addEventListener("click", () => page.zoom(1.5));
by("whole").addEventListener("click", () => page.showAll());
by("forget").addEventListener("click", () => page.follow(null));
new ResizeObserver(() => page.repaint()).observe(document.querySelector("main"));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => page.repaint());
for (const [name, printing] of [["beforeprint", true], ["afterprint", false]]) {
  window.addEventListener(name, () => {
    document.documentElement.classList.toggle("printing", printing);
    page.density = printing ? 3 : null;
    page.paint();
  });
}
if (page.data.marked) page.showPath(true);
page.paint();
