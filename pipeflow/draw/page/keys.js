/* Keys: what each key does to a page, and moving from block to block. */

import {gapsOf} from "./data.js";
import {nearest} from "./geometry.js";
import {say, tellBlock} from "./tip.js";
import {saidRange, spoken} from "./words.js";

const STEPS = {
  ArrowLeft: (timeline, block) => timeline.rows[block.rank].blocks[Math.ceil(block.index) - 1],
  ArrowRight: (timeline, block) => timeline.rows[block.rank].blocks[Math.floor(block.index) + 1],
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

/** The idle time after a block or an idle time, or before it if `step` is -1: of its rank, or else of the next rank. */
function gapFrom(page, {timeline}, {rank, index}, step) {
  const gaps = timeline.rows.flatMap((row) => gapsOf(row, timeline.makespan, page.least));
  const isFarther = (gap) => step * (gap.rank - rank || gap.index - index) > 0;
  return (step > 0 ? gaps.find(isFarther) : gaps.findLast(isFarther)) ?? gaps.at(step > 0 ? 0 : -1);
}

/** Brings a block or an idle time into view, and describes it. It gets the focus unless that is to be `kept`. */
export function focusOn(page, chart, block, kept = false) {
  if (!block) return;
  const {view} = page;
  chart.focus = block;
  page.held = kept ? chart : null;
  if (!kept) chart.lanes.focus({preventScroll: true});
  if (block.end > view.last || block.start < view.first) page.show((block.start + block.end - page.length) / 2, page.length);
  page.paint();
  const box = chart.lanes.getBoundingClientRect();
  const {pitch, lanes, x} = chart.place;
  const top = box.top + block.rank * pitch;
  const hidden = Math.min(top - 90, 0) || Math.max(top + pitch - innerHeight + 8, 0);
  if (hidden) window.scrollBy(0, hidden);
  const middle = (x(Math.max(block.start, view.first)) + x(Math.min(block.end, view.last))) / 2;
  tellBlock(page, block, box.left + middle, top - hidden + lanes[block.lane].top + lanes[block.lane].height);
  say(spoken(page.data, block));
}

function select(page, first, last) {
  page.select(first, last);
  say(`selected: ${saidRange(page.data, page.selection)}`);
}

/** The effect of each key. Some depend on the chart that has the focus. */
function does(page, chart, event, letGo) {
  const found = {
    "+": () => page.zoom(1 / 1.5), "=": () => page.zoom(1 / 1.5), "-": () => page.zoom(1.5), _: () => page.zoom(1.5),
    0: () => page.showAll(), z: () => page.showSelected(), c: () => page.showPath(!page.marks.path),
    Escape: () => { page.clear(); letGo(); },
  };
  if (chart || event.target === document.body) found[" "] = page.play;
  const on = chart ?? page.charts[0];
  const focus = on.focus ?? {rank: 0, index: -1, start: page.view.first, end: page.view.last};
  found.g = () => focusOn(page, on, gapFrom(page, on, focus, event.shiftKey ? -1 : 1));
  found["["] = found["{"] = () => select(page, focus.start, Math.max(page.selection?.last ?? 0, focus.end));
  found["]"] = found["}"] = () => select(page, Math.min(page.selection?.first ?? focus.start, focus.start), focus.end);
  if (event.shiftKey && event.key in STEPS) {
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
    if (event.ctrlKey || event.metaKey || event.altKey || !page.data) return;
    if (event.target.matches?.("input:not([type=checkbox]), select, textarea")) return; // which keys change themselves
    const chart = page.charts.find(({lanes}) => lanes === document.activeElement);
    const found = does(page, chart, event, letGo);
    const key = event.key.length === 1 ? event.key.toLowerCase() : event.key;
    if (!(key in found)) return;
    event.preventDefault();
    found[key]();
  });
}
