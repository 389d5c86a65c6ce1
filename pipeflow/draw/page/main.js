/* Main: makes the page from the data in the document. */

import {listenToBar} from "./bar.js";
import {read} from "./data.js";
import {Page, by} from "./page.js";
import {listenToPointers} from "./pointers.js";

const page = new Page((chart) => listenToPointers(page, chart));
listenToBar(page);
page.load(read(JSON.parse(by("data").textContent)));
if (page.data.marked) page.showPath(true);
