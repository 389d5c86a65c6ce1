/* Drag: blocks that pointers move, and actions that they bring from the palette. A marker shows where one would land. */

import {make} from "./controls.js";
import {AXIS} from "./geometry.js";

const SLACK = 40; // pixels above and below the lanes that still belong to the first and the last rank

/** The gap under a point of the window, as {gap, time}; null: none. */
function under(editor, {clientX, clientY}) {
  if (!editor.spans) return null;
  const {place, lanes} = editor.chart;
  const box = lanes.getBoundingClientRect();
  const [x, y] = [clientX - box.left, clientY - box.top];
  if (y < -SLACK || y > place.height + SLACK || x < 0 || x > box.width) return null;
  const rank = Math.min(Math.max(Math.floor(y / place.pitch), 0), editor.rows.length - 1);
  const time = place.time(x);
  return {gap: editor.gapAt(rank, time), time};
}

/** Shows where an entry would land. */
class Marker {
  #element = make("div", {className: "over drop", hidden: true});

  show({chart, spans}, {gap, time}, entry) {
    const row = spans[gap.rank].filter((span) => !span.lane);
    const before = row.findLast((span) => (span.start + span.end) / 2 <= time)?.end ?? 0;
    const behind = row.find((span) => (span.start + span.end) / 2 > time)?.start ?? Infinity;
    const {place} = chart;
    const x = place.x(Math.min(Math.max(time, before), behind));
    const y = AXIS + gap.rank * place.pitch;
    this.#element.textContent = entry;
    this.#element.hidden = false;
    Object.assign(this.#element.style, {left: `${x - 1.5}px`, top: `${y - 3}px`, height: `${place.lanes[0].height + 6}px`});
    chart.element.append(this.#element);
  }

  hide() {
    this.#element.hidden = true;
  }
}

const marker = new Marker();

/** A grip that drops `entry` where the pointer lets it go: then it calls `drop(gap)`. */
function carry(editor, entry, drop, click) {
  let given = false;
  const giveUp = (event) => { if (event.key === "Escape") end(); };
  const end = () => { given = true; marker.hide(); window.removeEventListener("keydown", giveUp); };
  window.addEventListener("keydown", giveUp);
  return {
    move(event) {
      const found = given ? null : under(editor, event);
      if (found) marker.show(editor, found, entry);
      else marker.hide();
      editor.pan(event);
    },
    drop(event) {
      const found = given ? null : under(editor, event);
      end();
      if (found) drop(found.gap);
    },
    click(event) { end(); click(event); },
    cancel: end,
  };
}

/** Lets pointers move the blocks of the reader's schedule, and put the armed entry into it. */
export function listenToDrags(editor, page) {
  page.takers.push((chart, event, {block}) => {
    if (!editor.canEdit(chart) || event.button) return null;
    const {armed} = editor;
    if (armed !== null) {
      const put = (gap) => editor.insert(armed, gap);
      return carry(editor, armed, put, (up) => put(under(editor, up).gap));
    }
    if (!block || block.gap) return null;
    const from = editor.placeOf(block);
    return carry(editor, editor.entry(from), (gap) => editor.move(from, gap), () => editor.select(block));
  });
}

/** Shows where the armed entry would land while the pointer moves over the chart of the editor. */
export function followPointer(editor) {
  const {lanes} = editor.chart;
  lanes.addEventListener("pointermove", (event) => {
    const found = editor.armed !== null && under(editor, event);
    if (found) marker.show(editor, found, editor.armed);
  });
  lanes.addEventListener("pointerleave", () => { if (editor.armed !== null) marker.hide(); });
}

/** Lets pointers carry `entry()` from an element of the palette into a timeline. */
export function letCarry(editor, element, entry) {
  let grip = null;
  let from = null;
  element.addEventListener("pointerdown", (event) => {
    if (event.button || !editor.spans) return;
    from = event;
    element.setPointerCapture(event.pointerId);
    grip = carry(editor, entry(), (gap) => editor.insert(entry(), gap), () => {});
  });
  element.addEventListener("pointermove", (event) => grip?.move(event));
  element.addEventListener("pointerup", (event) => {
    const still = from && Math.abs(event.clientX - from.clientX) + Math.abs(event.clientY - from.clientY) < 4;
    grip?.[still ? "click" : "drop"](event);
    grip = null;
  });
  element.addEventListener("pointercancel", () => { grip?.cancel(); grip = null; });
}
