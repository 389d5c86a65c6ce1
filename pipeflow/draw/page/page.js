/* Page: what is seen and what is marked. How things look is in paint.js, what changes them in input.js. */

const timelines = written.timelines.map(makeTimeline);
const horizon = Math.max(...timelines.map((timeline) => timeline.makespan)) || 1;
const narrowest = Math.max(Math.min(horizon, written.shortest * 1.5), horizon * 1e-7);
const by = (id) => document.getElementById(id);

const view = {first: 0, last: horizon};
const marks = {
  path: false,
  way: null, // the microbatch that is followed
  dims(block) {
    if (!this.path && this.way === null) return false;
    return !(this.path && block.critical) && block.microbatch !== this.way;
  },
};

/** A timeline's place in the page. */
function makeChart(timeline, number) {
  const chart = document.querySelectorAll(".chart")[number];
  const over = (name) => chart.appendChild(Object.assign(document.createElement("div"), {className: `over ${name}`, hidden: true}));
  const [axis, lanes] = chart.querySelectorAll("canvas");
  return {timeline, chart, axis, lanes, place: null, focus: null,
          cursor: over("cursor"), pointed: over("pointed"), focused: over("focused")};
}

const charts = timelines.map(makeChart);

/* What is seen. */

let waiting = false;
let density = null; // of the printer; null on the screen

function repaint() {
  if (waiting) return;
  waiting = true;
  requestAnimationFrame(() => { waiting = false; paintAll(); });
}

function paintAll() {
  const colours = scheme();
  document.documentElement.style.setProperty("--bar", `${document.querySelector(".bar").offsetHeight}px`);
  const dense = charts.map((chart) => paintChart(chart, colours)).some(Boolean);
  by("view").textContent = `${said(view.first)} to ${said(view.last)}${dense ? "; colours are mixed where blocks are too small" : ""}`;
}

/** Whether a lane was too dense for blocks. */
function paintChart(chart, colours) {
  const {timeline} = chart;
  const wide = chart.chart.clientWidth;
  const place = layOut(timeline, wide);
  place.x = (time) => place.left + ((time - view.first) * place.width) / (view.last - view.first);
  place.time = (x) => view.first + ((x - place.left) * (view.last - view.first)) / place.width;
  chart.place = place;
  const sharp = density ?? window.devicePixelRatio;
  paintAxis(prepared(chart.axis, wide, AXIS, sharp), place, view, colours);
  const context = prepared(chart.lanes, wide, place.height, sharp);
  paintGround(context, timeline, place, view, colours);
  const dense = paintLanes(context, timeline, place, view, marks, colours);
  if (marks.way !== null) paintLinks(context, steps(wayOf(timeline, marks.way)), place, colours.text, 1.25);
  if (marks.path) paintLinks(context, steps(timeline.path), place, colours.accent, 1.75);
  frameBlock(chart, chart.focused, document.activeElement === chart.lanes ? chart.focus : null);
  return dense;
}

/** From each block to the next one; weight gradients, which nothing waits for, are left out. */
function steps(blocks) {
  const chain = blocks.filter((block) => block.critical && marks.path || block.kind !== "W");
  return chain.slice(1).map((block, index) => [chain[index], block]);
}

/** Puts a frame around a block, as far as it is in view. */
function frameBlock(chart, over, block) {
  const {place} = chart;
  const first = block && Math.max(place.x(block.start), place.left);
  const end = block && Math.min(place.x(block.end), place.left + place.width);
  over.hidden = !block || end < first;
  if (over.hidden) return;
  const height = block.kind === "R" ? place.bar : place.lane;
  const top = AXIS + block.rank * place.pitch + place.lane - height;
  Object.assign(over.style, {left: `${first - 2}px`, top: `${top - 2}px`, width: `${end - first + 3}px`, height: `${height + 4}px`});
}

/* Zoom and move. */

/** Shows from `first` on for `length`, within the step. */
function show(first, length) {
  const span = Math.min(Math.max(length, narrowest), horizon);
  view.first = Math.min(Math.max(first, 0), horizon - span);
  view.last = view.first + span;
  repaint();
}

/** Makes what is seen `factor` times as long, `time` staying where it is. */
function zoom(factor, time = (view.first + view.last) / 2) {
  const length = view.last - view.first;
  const span = Math.min(Math.max(length * factor, narrowest), horizon);
  show(time - ((time - view.first) * span) / length, span);
}

function move(part) {
  show(view.first + part * (view.last - view.first), view.last - view.first);
}

/* What is marked. */

function showPath(on) {
  marks.path = by("path").checked = on;
  repaint();
}

function follow(microbatch) {
  marks.way = microbatch;
  by("forget").hidden = microbatch === null;
  by("way").textContent = microbatch === null ? "" : saidWay(microbatch);
  repaint();
}

function saidWay(microbatch) {
  const ends = timelines.map((timeline) => wayOf(timeline, microbatch)).filter((way) => way.length);
  const times = ends.map((way) => `${said(way[0].start)} to ${said(Math.max(...way.map((block) => block.end)))}`);
  return `microbatch ${microbatch}: ${times.join("; ")}`;
}
