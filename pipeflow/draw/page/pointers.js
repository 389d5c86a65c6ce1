/* Pointers: what lies under them, and how the wheel, drags, pinches and clicks change a page. */

import {gapsOf} from "./data.js";
import {blockAt, laneAt} from "./geometry.js";
import {tellBlock, tellNothing, tellText} from "./tip.js";
import {saidMemory} from "./words.js";

const HINT = "Hold Ctrl while you turn the wheel to zoom, or Shift to move.";
let hinted = 0; // times

/** What lies under the pointer: a time, a row if it is within the lanes, and the block if there is one. */
function under(page, chart, event) {
  const box = chart.lanes.getBoundingClientRect();
  const {place, timeline} = chart;
  const [x, y] = [event.clientX - box.left, event.clientY - box.top];
  const {rank, lane} = laneAt(place, y);
  const [time, row] = [place.time(x), timeline.rows[rank]];
  if (!row || x < place.left || x > place.left + place.width) return {time, row: null, block: null};
  const slack = (2 * page.length) / place.width;
  const block = lane === null ? null : blockAt(row.lanes[lane], time, slack);
  return {time, row, lane, block: block ?? (lane === 0 ? gapAt(page, chart, row, time) : null)};
}

/** The idle time of a rank at a time; null if there is none. */
function gapAt(page, {timeline}, row, time) {
  return gapsOf(row, timeline.makespan, page.least).find(({start, end}) => start <= time && time < end) ?? null;
}

/** Describes what lies under the pointer, and shows its time on all lanes; at the right, what the measures are. */
function point(page, chart, event) {
  const {time, row, lane, block} = under(page, chart, event);
  for (const {cursor, place} of page.charts) {
    cursor.hidden = row === null;
    cursor.style.left = `${place.x(time)}px`;
  }
  chart.frame(chart.pointed, block);
  if (block) tellBlock(page, block, event.clientX, event.clientY);
  else if (row !== null && lane === null) tellText(saidMemory(page.data, row, time, page.view), event.clientX, event.clientY);
  else if (time > page.view.last) tellText(page.data.margin, event.clientX, event.clientY);
  else tellNothing();
}

/** Hides the marks of the pointer. */
export function unpoint(page) {
  tellNothing();
  for (const chart of page.charts) chart.cursor.hidden = chart.pointed.hidden = true;
}

/** The wheel scrolls the page. With Ctrl it zooms around the pointer; a pinch on a touchpad comes as such events, in
 * small steps. Sideways, or with Shift, it moves along the lanes. */
function turn(page, chart, event) {
  const sideways = Math.abs(event.deltaX) > Math.abs(event.deltaY) || event.shiftKey;
  const {time, row} = under(page, chart, event);
  if (row === null) return;
  if (!(sideways || event.ctrlKey || event.metaKey)) {
    if (!hinted++) tellText(HINT, event.clientX, event.clientY);
    return;
  }
  event.preventDefault();
  const lines = event.deltaMode === WheelEvent.DOM_DELTA_LINE ? 16 : 1;
  if (sideways) page.move(((event.deltaX || event.deltaY) * lines) / chart.place.width);
  else page.zoom(Math.exp(event.deltaY * lines * (Math.abs(event.deltaY * lines) < 40 ? 0.01 : 0.002)), time);
  point(page, chart, event);
}

/** One of two fingers moved: the times under both stay under them. */
function pinch(page, chart, before, now, other) {
  const apart = (event) => Math.max(Math.hypot(event.clientX - other.clientX, event.clientY - other.clientY), 8);
  const middle = (event) => ({clientX: (event.clientX + other.clientX) / 2, clientY: (event.clientY + other.clientY) / 2});
  page.zoom(apart(before) / apart(now), under(page, chart, middle(before)).time);
  page.move((middle(before).clientX - middle(now).clientX) / chart.place.width);
}

/** Follows the microbatch of the block under the pointer; none if it is followed already, or in an idle time. */
function select(page, chart, event) {
  const {block} = under(page, chart, event);
  if (block) chart.focus = block;
  page.follow(block && block.followed !== page.marks.way ? block.followed : null);
  point(page, chart, event);
}

/** Without a button a pointer points, with one it drags, two pinch, and one that has not moved selects. If one of
 * `page.takers` returns a grip {move, drop, click, cancel}, this is told instead where the pointer goes. */
function listenToDrags(page, chart) {
  const {lanes} = chart;
  const down = new Map(); // the pointers that are down, where they were last
  let travelled = 0;
  let grip = null;
  const letGo = () => { grip?.cancel(); grip = null; };

  lanes.addEventListener("pointerdown", (event) => {
    lanes.setPointerCapture(event.pointerId);
    down.set(event.pointerId, event);
    letGo();
    if (down.size > 1) return;
    travelled = 0;
    const spot = under(page, chart, event);
    for (const take of page.takers) grip ??= take(chart, event, spot);
  });

  lanes.addEventListener("pointermove", (event) => {
    const before = down.get(event.pointerId);
    if (!before) {
      point(page, chart, event);
      return;
    }
    travelled += Math.abs(event.clientX - before.clientX) + Math.abs(event.clientY - before.clientY);
    if (travelled < 4) return;
    unpoint(page);
    lanes.classList.add("moving");
    if (grip) {
      grip.move(event);
      return;
    }
    const other = [...down.values()].find((one) => one.pointerId !== event.pointerId);
    if (other) pinch(page, chart, before, event, other);
    else {
      page.move((before.clientX - event.clientX) / chart.place.width);
      if (event.pointerType === "mouse") window.scrollBy(0, before.clientY - event.clientY);
    }
    down.set(event.pointerId, event);
  });

  lanes.addEventListener("pointerup", (event) => {
    const held = grip;
    grip = null;
    if (!down.has(event.pointerId)) return;
    if (held) (travelled < 4 ? held.click : held.drop)(event);
    else if (travelled < 4) select(page, chart, event);
  });
  lanes.addEventListener("pointercancel", letGo);
  lanes.addEventListener("touchstart", (event) => { if (grip) event.preventDefault(); }, {passive: false}); // no scrolling
  for (const name of ["pointerup", "pointercancel"]) {
    lanes.addEventListener(name, (event) => { down.delete(event.pointerId); lanes.classList.remove("moving"); });
  }
  lanes.addEventListener("pointerleave", (event) => { if (event.pointerType === "mouse") unpoint(page); });
}

/** A drag on the axis selects a range of time; a click there clears it. */
function listenToAxis(page, chart) {
  const {axis} = chart;
  let from = null;
  const timeAt = (event) => {
    const step = 10 ** Math.floor(Math.log10(page.length / 1000));
    return Math.round(chart.place.time(event.clientX - axis.getBoundingClientRect().left) / step) * step;
  };
  axis.addEventListener("pointerdown", (event) => {
    axis.setPointerCapture(event.pointerId);
    from = event;
  });
  axis.addEventListener("pointermove", (event) => {
    if (from && Math.abs(event.clientX - from.clientX) > 3) page.select(timeAt(from), timeAt(event), true);
  });
  axis.addEventListener("pointerup", (event) => {
    if (from && Math.abs(event.clientX - from.clientX) > 3) page.select(timeAt(from), timeAt(event));
    else page.select(null);
    from = null;
  });
  axis.addEventListener("pointercancel", () => { from = null; });
}

/** Lets pointers on a chart change its page. */
export function listenToPointers(page, chart) {
  const {lanes} = chart;
  lanes.addEventListener("wheel", (event) => turn(page, chart, event), {passive: false});
  lanes.addEventListener("dblclick", () => page.showAll());
  lanes.addEventListener("focus", () => page.repaint());
  lanes.addEventListener("blur", () => { unpoint(page); page.repaint(); });
  listenToDrags(page, chart);
  listenToAxis(page, chart);
}
