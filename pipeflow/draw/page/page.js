/* Page: what is seen, and how pointer and keys change it. How things look is in paint.js. */

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
  const top = AXIS + block.rank * place.pitch;
  Object.assign(over.style, {left: `${first - 2}px`, top: `${top - 2}px`, width: `${end - first + 3}px`, height: `${place.lane + 4}px`});
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

/* What a block says. */

function element(name, text, more = {}) {
  return Object.assign(document.createElement(name), {textContent: text}, more);
}

/** What there is to know of a block, as (name, text). */
function facts(block) {
  return [
    ["stage", `${block.stage} (chunk ${block.chunk} of its rank)`],
    ["microbatch", block.microbatch],
    ["rank", block.rank],
    ["start", said(block.start)],
    ["end", said(block.end)],
    ["duration", said(block.end - block.start)],
  ];
}

/** What a block waited for, and what else there is to say, as sentences. */
function sentences(block) {
  const idle = idleBefore(block);
  const found = [`${cause(block)}${idle > written.shortest * 1e-6 ? `; rank ${block.rank} stood idle for ${said(idle)}` : ""}.`];
  if (block.partner) found.push(`Overlapped with ${block.partner.action}.`);
  if (block.critical) found.push("On the critical path.");
  return found;
}

function describe(block) {
  const title = element("h3", "");
  const swatch = document.createElement("i");
  swatch.style.background = written.colours[block.kind][block.chunk];
  title.append(swatch, block.action, element("span", written.kinds[block.kind]));
  const list = document.createElement("dl");
  for (const [name, text] of facts(block)) list.append(element("dt", name), element("dd", text));
  const rest = sentences(block).map((text) => element("p", text, {className: text.startsWith("On the") ? "critical" : ""}));
  return [title, list, ...rest];
}

/** Shows the tip beside a point of the window, where it does not hide it. */
function tell(content, x, y) {
  const tip = by("tip");
  tip.replaceChildren(...content);
  tip.hidden = false;
  const {width, height} = tip.getBoundingClientRect();
  const left = x + 16 + width > innerWidth ? x - 16 - width : x + 16;
  const top = y + 20 + height > innerHeight ? y - 20 - height : y + 20;
  Object.assign(tip.style, {left: `${Math.min(Math.max(left, 8), Math.max(innerWidth - width - 8, 8))}px`, top: `${Math.max(top, 8)}px`});
}

/** What lies under a point of the window: a time, a rank, and the block if there is one. */
function under(chart, event) {
  const box = chart.lanes.getBoundingClientRect();
  const {place, timeline} = chart;
  const [x, y] = [event.clientX - box.left, event.clientY - box.top];
  const time = place.time(x);
  const rank = Math.floor(y / place.pitch);
  const row = timeline.rows[rank];
  if (!row || x < place.left || x > place.left + place.width) return {time, rank: null, block: null};
  const inLane = y - rank * place.pitch < place.lane;
  const slack = (2 * (view.last - view.first)) / place.width;
  return {time, rank, inLane, x, block: inLane ? blockAt(row, time, slack) : null};
}

function point(chart, event) {
  const {time, rank, inLane, x, block} = under(chart, event);
  for (const {cursor, place} of charts) {
    cursor.hidden = rank === null;
    cursor.style.left = `${place.x(time)}px`;
  }
  frameBlock(chart, chart.pointed, block);
  if (block) tell(describe(block), event.clientX, event.clientY);
  else if (rank !== null && !inLane) tell(describeMemory(chart.timeline, rank, time), event.clientX, event.clientY);
  else by("tip").hidden = true;
}

function describeMemory(timeline, rank, time) {
  const [kept, step] = [keptAt(timeline.curves[rank], time), 10 ** Math.floor(Math.log10((view.last - view.first) / 1000))];
  const when = said(Math.round(time / step) * step);
  return [element("div", `rank ${rank} keeps ${saidAmount(timeline, kept)} at ${when}`)];
}

function unpoint() {
  by("tip").hidden = true;
  for (const chart of charts) chart.cursor.hidden = chart.pointed.hidden = true;
}

/* Keys: from block to block. */

const STEPS = {
  ArrowLeft: (timeline, block) => timeline.rows[block.rank][block.index - 1],
  ArrowRight: (timeline, block) => timeline.rows[block.rank][block.index + 1],
  ArrowUp: (timeline, block) => nearest(timeline.rows[block.rank - 1], block),
  ArrowDown: (timeline, block) => nearest(timeline.rows[block.rank + 1], block),
};

/** The block of a row that runs when another one starts, or that did before. */
function nearest(row, block) {
  return row && row[Math.max(lastAt(row.length, (at) => row[at].start, block.start), 0)];
}

function firstShown(timeline) {
  const rows = timeline.rows.filter((row) => row.length);
  return rows.length ? rows[0].find((block) => block.end > view.first) ?? rows[0][0] : null;
}

/** Moves the focus to a block, brings it into view, and says what it is. */
function focusOn(chart, block) {
  if (!block) return;
  chart.focus = block;
  chart.lanes.focus({preventScroll: true});
  const length = view.last - view.first;
  if (block.end > view.last || block.start < view.first) show((block.start + block.end - length) / 2, length);
  paintAll();
  const box = chart.lanes.getBoundingClientRect();
  const y = box.top + block.rank * chart.place.pitch;
  const hidden = Math.min(y - 90, 0) || Math.max(y + chart.place.pitch - innerHeight + 8, 0);
  if (hidden) window.scrollBy(0, hidden);
  const x = box.left + (chart.place.x(Math.max(block.start, view.first)) + chart.place.x(Math.min(block.end, view.last))) / 2;
  tell(describe(block), x, y - hidden + chart.place.lane);
  const told = facts(block).map(([name, text]) => `${name} ${text}`);
  by("spoken").textContent = [`${block.action}, ${written.kinds[block.kind]}, ${told.join(", ")}.`, ...sentences(block)].join(" ");
}

function onKey(event) {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const chart = charts.find(({lanes}) => lanes === document.activeElement);
  const does = {
    "+": () => zoom(1 / 1.5), "=": () => zoom(1 / 1.5), "-": () => zoom(1.5), _: () => zoom(1.5), 0: () => show(0, horizon),
    c: () => showPath(!marks.path), C: () => showPath(!marks.path), Escape: () => { follow(null); unpoint(); },
  };
  if (event.shiftKey && event.key in STEPS) {
    const on = chart ?? charts[0];
    does[event.key] = () => focusOn(on, on.focus ? STEPS[event.key](on.timeline, on.focus) : firstShown(on.timeline));
  } else {
    does.ArrowLeft = () => move(-0.15);
    does.ArrowRight = () => move(0.15);
    if (chart?.focus) does.Enter = () => follow(marks.way === chart.focus.microbatch ? null : chart.focus.microbatch);
  }
  if (!(event.key in does)) return;
  event.preventDefault();
  does[event.key]();
}

/* Pointers. */

function listen(chart) {
  const {lanes} = chart;
  const down = new Map(); // pointers that are down, where they were last
  let travelled = 0;

  lanes.addEventListener("wheel", (event) => {
    if (under(chart, event).rank === null) return; // beside the lanes it scrolls the page
    event.preventDefault();
    const lines = event.deltaMode === WheelEvent.DOM_DELTA_LINE ? 16 : 1;
    if (Math.abs(event.deltaX) > Math.abs(event.deltaY) || event.shiftKey) {
      move(((event.deltaX || event.deltaY) * lines) / chart.place.width);
    } else zoom(Math.exp(event.deltaY * lines * (event.ctrlKey ? 0.01 : 0.002)), under(chart, event).time);
    point(chart, event);
  }, {passive: false});

  lanes.addEventListener("pointerdown", (event) => {
    lanes.setPointerCapture(event.pointerId);
    down.set(event.pointerId, event);
    if (down.size === 1) travelled = 0;
  });

  lanes.addEventListener("pointermove", (event) => {
    const before = down.get(event.pointerId);
    if (!before) {
      point(chart, event);
      return;
    }
    travelled += Math.abs(event.clientX - before.clientX) + Math.abs(event.clientY - before.clientY);
    if (travelled < 4) return;
    unpoint();
    lanes.classList.add("moving");
    const other = [...down.values()].find((one) => one.pointerId !== event.pointerId);
    if (other) pinch(chart, before, event, other);
    else {
      move((before.clientX - event.clientX) / chart.place.width);
      if (event.pointerType === "mouse") window.scrollBy(0, before.clientY - event.clientY);
    }
    down.set(event.pointerId, event);
  });

  lanes.addEventListener("pointerup", (event) => {
    if (down.has(event.pointerId) && travelled < 4) select(chart, event);
  });
  for (const name of ["pointerup", "pointercancel"]) {
    lanes.addEventListener(name, (event) => { down.delete(event.pointerId); lanes.classList.remove("moving"); });
  }
  lanes.addEventListener("pointerleave", (event) => { if (event.pointerType === "mouse") unpoint(); });
  lanes.addEventListener("dblclick", () => show(0, horizon));
  lanes.addEventListener("focus", repaint);
  lanes.addEventListener("blur", () => { unpoint(); repaint(); });
}

/** One of two fingers moved: the times under both stay under them. */
function pinch(chart, before, now, other) {
  const apart = (event) => Math.max(Math.hypot(event.clientX - other.clientX, event.clientY - other.clientY), 8);
  const middle = (event) => ({clientX: (event.clientX + other.clientX) / 2, clientY: (event.clientY + other.clientY) / 2});
  zoom(apart(before) / apart(now), under(chart, middle(before)).time);
  move((middle(before).clientX - middle(now).clientX) / chart.place.width);
}

function select(chart, event) {
  const {block} = under(chart, event);
  if (block) chart.focus = block;
  follow(block && block.microbatch !== marks.way ? block.microbatch : null);
  point(chart, event);
}

/* Beginning. */

charts.forEach(listen);
by("path").addEventListener("change", (event) => showPath(event.target.checked));
by("closer").addEventListener("click", () => zoom(1 / 1.5));
by("farther").addEventListener("click", () => zoom(1.5));
by("whole").addEventListener("click", () => show(0, horizon));
by("forget").addEventListener("click", () => follow(null));
window.addEventListener("keydown", onKey);
new ResizeObserver(repaint).observe(document.querySelector("main"));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", repaint);
for (const [name, printing] of [["beforeprint", true], ["afterprint", false]]) {
  window.addEventListener(name, () => {
    document.documentElement.classList.toggle("printing", printing);
    density = printing ? 3 : null;
    paintAll();
  });
}
paintAll();
