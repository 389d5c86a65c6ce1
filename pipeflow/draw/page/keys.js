/* Keys: what each key does to a page, and moving from block to block. */

import {nearest} from "./geometry.js";
import {speak, tellBlock} from "./tip.js";

const STEPS = {
  ArrowLeft: (timeline, block) => timeline.rows[block.rank].blocks[block.index - 1],
  ArrowRight: (timeline, block) => timeline.rows[block.rank].blocks[block.index + 1],
  ArrowUp: (timeline, block) => onRank(timeline.rows[block.rank - 1], block),
  ArrowDown: (timeline, block) => onRank(timeline.rows[block.rank + 1], block),
  Home: (timeline, _, view) => firstShown(timeline, view),
};

/** The block of another rank when this block starts: on the same stream if that has any. */
function onRank(row, block) {
  return row && nearest(row.lanes[block.lane].length ? row.lanes[block.lane] : row.lanes[0], block);
}

function firstShown(timeline, view) {
  const blocks = timeline.rows.map((row) => row.blocks).find((blocks) => blocks.length);
  return blocks && (blocks.find((block) => block.end > view.first) ?? blocks[0]);
}

/** Moves the focus to a block, brings it into view, and describes it. */
function focusOn(page, chart, block) {
  if (!block) return;
  const {view} = page;
  chart.focus = block;
  chart.lanes.focus({preventScroll: true});
  if (block.end > view.last || block.start < view.first) page.show((block.start + block.end - page.length) / 2, page.length);
  page.paint();
  const box = chart.lanes.getBoundingClientRect();
  const {pitch, lanes, x} = chart.place;
  const top = box.top + block.rank * pitch;
  const hidden = Math.min(top - 90, 0) || Math.max(top + pitch - innerHeight + 8, 0);
  if (hidden) window.scrollBy(0, hidden);
  const middle = (x(Math.max(block.start, view.first)) + x(Math.min(block.end, view.last))) / 2;
  tellBlock(page.data, block, box.left + middle, top - hidden + lanes[block.lane].top + lanes[block.lane].height);
  speak(page.data, block);
}

/** The effect of each key. Some depend on the chart that has the focus. */
function does(page, chart, event, letGo) {
  const found = {
    "+": () => page.zoom(1 / 1.5), "=": () => page.zoom(1 / 1.5), "-": () => page.zoom(1.5), _: () => page.zoom(1.5),
    0: () => page.showAll(), c: () => page.showPath(!page.marks.path), C: () => page.showPath(!page.marks.path),
    Escape: () => { page.follow(null); letGo(); },
  };
  if (event.shiftKey && event.key in STEPS) {
    const on = chart ?? page.charts[0];
    const block = on.focus ? STEPS[event.key](on.timeline, on.focus, page.view) : firstShown(on.timeline, page.view);
    found[event.key] = () => focusOn(page, on, block);
    return found;
  }
  found.ArrowLeft = () => page.move(-0.15);
  found.ArrowRight = () => page.move(0.15);
  if (chart?.focus) {
    const {followed} = chart.focus;
    found.Enter = () => page.follow(page.marks.way === followed ? null : followed);
  }
  return found;
}

/** Lets keys change a page. Escape also calls `letGo`. */
export function listenToKeys(page, letGo) {
  window.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.target.matches?.("input:not([type=checkbox]), select, textarea")) return; // which keys change themselves
    const chart = page.charts.find(({lanes}) => lanes === document.activeElement);
    const found = does(page, chart, event, letGo);
    if (!(event.key in found)) return;
    event.preventDefault();
    found[event.key]();
  });
}
