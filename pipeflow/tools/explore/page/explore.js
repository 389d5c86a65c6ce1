/* Explore: makes the page. Each feature is a function that gets what all of them share: the table of fields, the link,
 * the server, the page of timelines, and what is shown. */

import {listenToBar} from "./bar.js";
import {showBeside} from "./beside.js";
import {makeControls} from "./controls.js";
import {makeExport} from "./export.js";
import {showEditor} from "./edit.js";
import {openFiles} from "./files.js";
import {showFit} from "./fit.js";
import {keepFocus} from "./focus.js";
import {showHeadline} from "./headline.js";
import {Link} from "./link.js";
import {showModel} from "./model.js";
import {Page, by} from "./page.js";
import {listenToPointers} from "./pointers.js";
import {readTimelines} from "./reading.js";
import {showScatter} from "./scatter.js";
import {Server} from "./server.js";
import {Shown} from "./shown.js";
import {makeToolbars} from "./toolbars.js";
import {makeTour} from "./tour.js";

const table = JSON.parse(by("fields").textContent);
const link = new Link(table);
const server = new Server();
const page = new Page((chart) => listenToPointers(page, chart));
const shared = {table, link, server, page, shown: new Shown(table, link, server, page)};
listenToBar(page);
const FEATURES = [
  makeControls, showHeadline, showBeside, openFiles, readTimelines, showFit, showModel, makeTour, makeExport, showEditor,
  showScatter, makeToolbars, keepFocus,
];
for (const feature of FEATURES) feature(shared);
link.open();
