/* Explore: makes the page. Each feature is a module that gets what all of them share: the fields of the link, the server,
 * and the page of timelines. */

import {listenToBar} from "./bar.js";
import {makeControls} from "./controls.js";
import {Link} from "./link.js";
import {Page, by} from "./page.js";
import {listenToPointers} from "./pointers.js";
import {Server} from "./server.js";
import {showPlan} from "./plan.js";

const table = JSON.parse(by("fields").textContent);
const shared = {table, link: new Link(table), server: new Server()};
shared.page = new Page((chart) => listenToPointers(shared.page, chart));
listenToBar(shared.page);
for (const feature of [makeControls, showPlan]) feature(shared);
shared.link.open();
