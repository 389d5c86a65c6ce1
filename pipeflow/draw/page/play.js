/* Play: time runs over the timelines. What is to come is faint, microbatches travel as tokens, and idle ranks glow. Each
 * chart gets a canvas above its lanes, so that a frame paints no lane again. */

import {FONT, fillBlock} from "./canvas.js";
import {gapsOf} from "./data.js";
import {AXIS, lastAt} from "./geometry.js";
import {by} from "./page.js";
import {say} from "./tip.js";
import {saidTime} from "./words.js";

const [PLAY, PAUSE] = ["\u25b6\ufe0e Play", "\u2759\u2759 Pause"];
const PACE = {each: 0.35, least: 9, most: 30}; // seconds: of the shortest block, and of the whole step
const GLIDE = 0.4; // the part of a block in which its token comes from the rank before
const TURNS = 24; // moments of a step that are shown to readers who want less motion
const still = matchMedia("(prefers-reduced-motion: reduce)");

/** The idle times of a timeline, and the rank that the microbatch of each block comes from. */
function factsOf(timeline, least) {
  const gaps = timeline.rows.flatMap((row) => gapsOf(row, timeline.makespan, least));
  const [sources, last] = [new Map(), new Map()];
  const passing = timeline.rows.flatMap((row) => row.lanes[0].filter(({kind, followed}) => kind.passes && followed !== null));
  for (const block of passing.sort((one, other) => one.start - other.start)) {
    sources.set(block, last.get(block.followed));
    last.set(block.followed, block.rank);
  }
  return {gaps, sources};
}

/** The context of the canvas above a chart, empty; its unit and its origin are those of the lanes. */
function layerOf(chart) {
  const {element, lanes, place} = chart;
  const make = () => Object.assign(document.createElement("canvas"), {className: "over playing", ariaHidden: "true"});
  const layer = chart.layer ??= element.appendChild(make());
  const ratio = lanes.width / (place.left + place.width + place.right);
  const [width, height] = [lanes.width, Math.round((place.height + AXIS) * ratio)];
  if (layer.width !== width || layer.height !== height) Object.assign(layer, {width, height});
  layer.style.height = `${place.height + AXIS}px`;
  const context = layer.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, AXIS * ratio);
  context.clearRect(0, -AXIS, width, height);
  return context;
}

/** Paints the idle times until a moment; those that last glow. Returns the sum of all. */
function paintIdle(context, {place}, gaps, time, glow) {
  const {height} = place.lanes[0];
  let sum = 0;
  for (const gap of gaps) {
    if (gap.start >= time) continue;
    const end = Math.min(gap.end, time);
    sum += end - gap.start;
    const [from, to] = [Math.max(place.x(gap.start), place.left), Math.min(place.x(end), place.left + place.width)];
    if (to <= from) continue;
    context.globalAlpha = gap.end > time ? glow : 0.3;
    context.fillRect(from, place.y(gap), to - from, height);
    if (gap.end <= time) continue;
    context.globalAlpha = glow / 3;
    context.fillRect(from - 3, place.y(gap) - 3, to - from + 6, height + 6);
  }
  return sum;
}

/** Paints the token of the block that a row computes at a moment. Returns whether there is such a block. */
function paintToken(context, {palette}, {place}, {rank, tracks: [{starts, blocks, shades}]}, {sources, time, colours}) {
  const at = lastAt(starts.length, (index) => starts[index], time);
  const block = blocks[at];
  if (!block || time >= block.end) return false;
  const part = still.matches ? 1 : Math.min((time - block.start) / (GLIDE * (block.end - block.start)), 1);
  const {height} = place.lanes[0];
  const [x, y] = [place.x(time), (rank + ((sources.get(block) ?? rank) - rank) * (1 - part) ** 3) * place.pitch + height / 2];
  const radius = Math.min(Math.max(height * 0.6, 6), 13);
  context.fillStyle = palette.colours[shades[at]];
  context.beginPath();
  context.arc(x, y, radius, 0, 7);
  context.fill();
  context.stroke();
  context.fillStyle = colours.ink;
  if (block.part.length * 4 <= radius * 1.7) context.fillText(block.part, x, y + 3.5);
  return true;
}

/** Paints a moment onto a chart. Returns what it says about it. */
function paintMoment(page, chart, time, colours) {
  const {place, timeline, timeline: {rows}} = chart;
  const {gaps, sources} = timeline.facts ??= factsOf(timeline, page.least);
  const context = layerOf(chart);
  const right = place.left + place.width;
  const head = Math.min(Math.max(place.x(time), place.left), right);
  context.globalAlpha = 0.68;
  context.fillStyle = colours.background;
  context.fillRect(head, 0, right - head, place.height);
  context.fillStyle = colours.glow;
  const idle = paintIdle(context, chart, gaps, time, still.matches ? 0.7 : 0.6 + 0.2 * Math.sin(performance.now() / 160));
  context.globalAlpha = 1;
  Object.assign(context, {font: `bold 10px ${FONT}`, textAlign: "center", lineWidth: 1.5});
  context.fillStyle = context.strokeStyle = colours.text;
  context.fillRect(Math.round(head), 0, 1.5, place.height);
  const inView = head === place.x(time); // else the tokens are beside the lanes
  const busy = rows.filter((row) => inView && paintToken(context, page, chart, row, {sources, time, colours})).length;
  const share = (100 * idle) / (Math.min(time, timeline.makespan) * rows.length || 1);
  const count = inView ? `${busy} of ${rows.length} ranks busy, ` : "";
  const said = `${saidTime(page.data, Number(time.toPrecision(3)))}: ${count}${share.toFixed(0)}% idle so far`;
  if (chart.element.closest(".wiped")) return said; // the edge would cut the text amid a number
  const half = context.measureText(said).width / 2 + 8;
  const middle = Math.min(Math.max(head, place.left + half - 20), right - half + 20);
  context.fillStyle = colours.text;
  fillBlock(context, middle - half, 1 - AXIS, 2 * half, AXIS - 4);
  context.fillStyle = colours.background;
  context.fillText(said, middle, 14 - AXIS);
  return said;
}

/** Lets the button, the slider of time and the space bar play a page. */
export function makePlayer(page) {
  const [button, slider] = [by("play"), by("moment")];
  let [time, playing, last, colours, said] = [null, false, 0, null, ""]; // `time` is the moment that is shown, or null

  const show = () => {
    for (const {layer} of page.charts) if (layer) layer.hidden = time === null;
    slider.value = (1000 * time) / page.horizon;
    [said] = time === null || !colours ? [""] : page.charts.map((chart) => paintMoment(page, chart, time, colours));
  };
  const frame = (now) => {
    if (!playing) return;
    const whole = 1000 * Math.min(Math.max((PACE.each * page.horizon) / page.data.shortest, PACE.least), PACE.most);
    const passed = still.matches ? Math.floor(((now - last) * TURNS) / whole) / TURNS : Math.min(now - last, 100) / whole;
    if (passed) [time, last] = [time + passed * page.horizon, now];
    if (time < page.horizon) requestAnimationFrame(frame);
    else stop(page.horizon);
    if (time > page.view.last) page.show(time, page.length);
    show();
  };
  function stop(moment) {
    [playing, time, button.textContent] = [false, moment, PLAY];
    show();
    say(said);
  }
  function start() {
    if (time === null || time < page.view.first || time >= page.view.last) time = page.view.first;
    [playing, last, button.textContent] = [true, performance.now(), PAUSE];
    requestAnimationFrame(frame);
  }
  page.play = () => { if (page.data) (playing ? () => stop(time) : start)(); };
  page.unplay = () => { if (time !== null) stop(null); };
  button.addEventListener("click", page.play);
  slider.addEventListener("input", () => { if (page.data) stop((slider.value * page.horizon) / 1000); });
  page.painters.push((context, chart, scheme) => {
    colours = scheme;
    if (time !== null) paintMoment(page, chart, time = Math.min(time, page.horizon), colours);
  });
}
