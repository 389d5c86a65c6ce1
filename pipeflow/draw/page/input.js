/* Input: how pointers and keys change what is seen, marked and told. */

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
  const inBar = y - rank * place.pitch >= place.lane - place.bar;
  const found = [blockAt(row, time, slack), blockAt(timeline.reductions[rank], time, slack)];
  return {time, rank, inLane, x, block: inLane ? found[Number(inBar)] ?? found[Number(!inBar)] : null};
}

/** Says what lies under the pointer, and shows its time on all lanes. */
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

function unpoint() {
  by("tip").hidden = true;
  for (const chart of charts) chart.cursor.hidden = chart.pointed.hidden = true;
}

/* Keys: from block to block. */

const STEPS = {
  ArrowLeft: (timeline, block) => blockWith(timeline, block.rank, block.index - 1),
  ArrowRight: (timeline, block) => blockWith(timeline, block.rank, block.index + 1),
  ArrowUp: (timeline, block) => nearest(timeline.rows[block.rank - 1], block),
  ArrowDown: (timeline, block) => nearest(timeline.rows[block.rank + 1], block),
  Home: (timeline) => firstShown(timeline),
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
    if (chart?.focus) does.Enter = () => follow(marks.way === chart.focus.microbatch ? null : chart.focus.microbatch ?? null);
  }
  if (!(event.key in does)) return;
  event.preventDefault();
  does[event.key]();
}

/* Pointers and wheel. */

function listen(chart) {
  const {lanes} = chart;
  lanes.addEventListener("wheel", (event) => turn(chart, event), {passive: false});
  lanes.addEventListener("dblclick", () => show(0, horizon));
  lanes.addEventListener("focus", repaint);
  lanes.addEventListener("blur", () => { unpoint(); repaint(); });
  listenToPointers(chart);
}

/** The wheel: along the lanes it moves, across it zooms around the pointer. */
function turn(chart, event) {
  const {time, rank} = under(chart, event);
  if (rank === null) return; // beside the lanes it scrolls the page
  event.preventDefault();
  const lines = event.deltaMode === WheelEvent.DOM_DELTA_LINE ? 16 : 1;
  if (Math.abs(event.deltaX) > Math.abs(event.deltaY) || event.shiftKey) {
    move(((event.deltaX || event.deltaY) * lines) / chart.place.width);
  } else {
    zoom(Math.exp(event.deltaY * lines * (event.ctrlKey ? 0.01 : 0.002)), time); // a pinch on a touchpad is a wheel with ctrl
  }
  point(chart, event);
}

/** Without a button a pointer points; with one it drags; two pinch; one that has not moved selects. */
function listenToPointers(chart) {
  const {lanes} = chart;
  const down = new Map(); // the pointers that are down, where they were last
  let travelled = 0;

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
}

/** One of two fingers moved: the times under both stay under them. */
function pinch(chart, before, now, other) {
  const apart = (event) => Math.max(Math.hypot(event.clientX - other.clientX, event.clientY - other.clientY), 8);
  const middle = (event) => ({clientX: (event.clientX + other.clientX) / 2, clientY: (event.clientY + other.clientY) / 2});
  zoom(apart(before) / apart(now), under(chart, middle(before)).time);
  move((middle(before).clientX - middle(now).clientX) / chart.place.width);
}

/** Follows the microbatch of the block under the pointer; none when it is followed already, or when there is no block. */
function select(chart, event) {
  const {block} = under(chart, event);
  if (block) chart.focus = block;
  follow(block && block.microbatch !== marks.way ? block.microbatch ?? null : null);
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
