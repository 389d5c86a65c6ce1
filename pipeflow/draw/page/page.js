/* Page: its timelines, the part of them in view, and the marks. Must not contain: how it looks, and which pointers and
 * keys change it. */

import {prepared, scheme} from "./canvas.js";
import {paletteOf, shadeOf, wayOf} from "./data.js";
import {findBlocks} from "./find.js";
import {AXIS, layOut, margins} from "./geometry.js";
import {paintAxis, paintGround, paintLanes, paintLinks} from "./paint.js";
import {saidRange, saidWay} from "./words.js";

export const by = (id) => document.getElementById(id);

/** The marks: the critical path, the `way` of a microbatch, what was `found`, a set of blocks, and what differs from the
 * first timeline. */
class Marks {
  path = false;
  differences = false;
  way = null;
  found = null;

  get any() {
    return this.path || this.way !== null || this.found !== null;
  }

  /** Whether something else than this block is marked. */
  dims(block) {
    return this.any && !(this.path && block.critical) && (this.way === null || block.followed !== this.way)
      && !this.found?.has(block);
  }

  /** Links from each block to the next one that others wait for, or that is on a marked critical path. */
  steps(blocks) {
    const chain = blocks.filter((block) => (block.critical && this.path) || block.kind.passes);
    return chain.slice(1).map((block, index) => [chain[index], block]);
  }
}

/** One timeline's place in the document. */
class Chart {
  place = null;
  focus = null;

  constructor(timeline, element) {
    const over = (name) => {
      const div = Object.assign(document.createElement("div"), {className: `over ${name}`, hidden: true});
      return element.appendChild(div);
    };
    [this.axis, this.lanes] = element.querySelectorAll("canvas");
    Object.assign(this, {timeline, element, cursor: over("cursor"), pointed: over("pointed"), focused: over("focused")});
    this.selected = over("selected");
    this.lanes.style.height = `${layOut(timeline, {first: 0, last: 1}, 0, {left: 0, right: 0}).height}px`;
  }

  /** Shows the selected range of time. */
  span(selection) {
    this.selected.hidden = !selection;
    if (!selection) return;
    const {x, left, width} = this.place;
    const [first, last] = [selection.first, selection.last].map((time) => Math.min(Math.max(x(time), left), left + width));
    Object.assign(this.selected.style, {left: `${first}px`, width: `${last - first}px`});
  }

  /** Puts a frame around the visible part of a block. */
  frame(over, block) {
    const {place} = this;
    const first = block && Math.max(place.x(block.start), place.left);
    const end = block && Math.min(place.x(block.end), place.left + place.width);
    over.hidden = !block || end < first;
    if (over.hidden) return;
    const {height} = place.lanes[block.lane];
    const [left, top] = [first - 2, AXIS + place.y(block) - 2];
    Object.assign(over.style, {left: `${left}px`, top: `${top}px`, width: `${end - first + 3}px`, height: `${height + 4}px`});
  }

  /** Whether any lane was too dense for blocks. */
  paint({data, view, marks, density, margins, palette, selection, held, painters}, colours) {
    const {timeline, element} = this;
    const wide = element.clientWidth;
    const place = this.place = layOut(timeline, view, wide, margins);
    const sharp = density ?? window.devicePixelRatio;
    paintAxis(prepared(this.axis, wide, AXIS, sharp), data, place, view, colours);
    const context = prepared(this.lanes, wide, place.height, sharp);
    paintGround(context, data, timeline, place, view, colours);
    const dense = paintLanes(context, timeline, place, view, marks, palette, colours);
    if (marks.way !== null) paintLinks(context, marks.steps(wayOf(timeline, marks.way)), place, colours.text, 1.25);
    if (marks.path) paintLinks(context, marks.steps(timeline.path), place, colours.accent, 1.75);
    for (const paint of painters) paint(context, this, colours);
    this.frame(this.focused, document.activeElement === this.lanes || held === this ? this.focus : null);
    this.span(selection);
    return dense;
  }
}

/** A page. Calls `listen` with each chart that it makes. */
export class Page {
  marks = new Marks();
  density = null; // pixel density of the printer; null on the screen
  view = {first: 0, last: 0};
  horizon = 0;
  charts = [];
  mode = "kind"; // what colours stand for
  selection = null; // the selected range of time, {first, last}
  sought = ""; // what is to be found
  matches = []; // what was found, each with the number of its chart
  held = null; // the chart whose focus is shown though the reader types elsewhere
  painters = []; // functions (context, chart, colours) that paint over the lanes of a chart
  takers = []; // functions (chart, event, spot) that may take a pointer that goes down there: see pointers.js
  #match = -1; // the one that was gone to last
  #loading = false;
  #waiting = false;
  #listen;
  #listeners = [];

  constructor(listen) {
    this.#listen = listen;
  }

  /** Shows data that `read` returned, in the elements `.chart` of the document. If all was in view, all is. */
  load(data) {
    const whole = this.length >= this.horizon;
    this.data = data;
    this.horizon = Math.max(...data.timelines.map((timeline) => timeline.makespan)) || 1;
    this.narrowest = Math.max(Math.min(this.horizon, data.shortest * 1.5), this.horizon * 1e-7);
    this.view.last = Math.min(whole ? this.horizon : this.view.last, this.horizon);
    this.view.first = whole ? 0 : Math.max(Math.min(this.view.first, this.view.last - this.narrowest), 0);
    this.margins = margins(data.timelines);
    const elements = document.querySelectorAll(".chart");
    this.charts = data.timelines.map((timeline, number) => new Chart(timeline, elements[number]));
    this.charts.forEach((chart) => this.#listen(chart));
    this.held = null;
    this.#loading = true;
    this.colourBy(this.mode);
    this.showPath(this.marks.path);
    this.follow(this.marks.way);
    this.find(this.sought);
    this.#loading = false;
  }

  /** Calls `listener(change)` whenever the reader has changed something: "view" is the time that is shown; "marks" are
   * the marks, the colours or the selection, and "moving" are these while they go on changing. */
  listen(listener) {
    this.#listeners.push(listener);
  }

  #tell(change) {
    if (this.#loading) return;
    for (const listener of this.#listeners) listener(change);
  }

  get length() {
    return this.view.last - this.view.first;
  }

  /** Idle times that are not longer are none. */
  get least() {
    return this.data.shortest * 1e-6;
  }

  repaint() {
    if (this.#waiting || !this.data) return;
    this.#waiting = true;
    requestAnimationFrame(() => { this.#waiting = false; this.paint(); });
  }

  paint() {
    const colours = scheme();
    const bar = document.querySelector(".bar");
    const covered = getComputedStyle(bar).position === "sticky" ? bar.offsetHeight : 0;
    document.documentElement.style.setProperty("--bar", `${covered}px`);
    const dense = this.charts.map((chart) => chart.paint(this, colours)).some(Boolean);
    by("view").textContent = `${saidRange(this.data, this.view)}${dense ? "; colours are mixed where blocks are too small" : ""}`;
  }

  /** Shows the time from `first` on for `length`, within the step. */
  show(first, length) {
    const span = Math.min(Math.max(length, this.narrowest), this.horizon);
    this.view.first = Math.min(Math.max(first, 0), this.horizon - span);
    this.view.last = this.view.first + span;
    this.repaint();
    this.#tell("view");
  }

  showAll() {
    this.show(0, this.horizon);
  }

  /** Makes the visible time `factor` times as long; `time` stays where it is. */
  zoom(factor, time = (this.view.first + this.view.last) / 2) {
    const span = Math.min(Math.max(this.length * factor, this.narrowest), this.horizon);
    this.show(time - ((time - this.view.first) * span) / this.length, span);
  }

  /** Moves the view by a part of its length. */
  move(part) {
    this.show(this.view.first + part * this.length, this.length);
  }

  /** Selects the time between `one` and `other`; null: none. */
  select(one, other, moving = false) {
    const [first, last] = [Math.min(one, other), Math.max(one, other)].map((time) => Math.min(Math.max(time, 0), this.horizon));
    this.selection = one === null || last <= first ? null : {first, last};
    this.repaint();
    this.#tell(moving ? "moving" : "marks");
  }

  /** Shows the selected time. */
  showSelected() {
    if (this.selection) this.show(this.selection.first, this.selection.last - this.selection.first);
  }

  /** Clears the selection, and what is followed or found. */
  clear() {
    this.select(null);
    this.find("");
    this.follow(null);
  }

  /** Lets colours stand for "kind", "chunk" or "microbatch". */
  colourBy(mode) {
    this.mode = by("colour").value = mode;
    document.documentElement.dataset.colour = mode;
    const {firsts} = this.palette = paletteOf(this.data, mode);
    this.#eachTrack(({blocks, shades}) => {
      blocks.forEach((block, at) => { shades[at] = firsts.get(block.kind) + shadeOf(block, mode); });
    });
    this.repaint();
    this.#tell("marks");
  }

  showPath(on) {
    this.marks.path = by("path").checked = on;
    this.#mark();
  }

  /** Follows a microbatch through the ranks; null: none. */
  follow(microbatch) {
    this.marks.way = microbatch;
    by("forget").hidden = microbatch === null;
    const ways = this.data.timelines.map((timeline) => (microbatch === null ? [] : wayOf(timeline, microbatch)));
    by("way").textContent = microbatch === null ? "" : saidWay(this.data, microbatch, ways);
    this.#mark();
  }

  /** Marks the blocks that a text describes; an empty text: none. */
  find(text, moving = false) {
    this.sought = text.trim();
    if (document.activeElement !== by("find") || !text) by("find").value = text;
    const found = this.sought ? findBlocks(this.sought, this.data) : [];
    this.matches = found ?? [];
    this.#match = -1;
    this.marks.found = this.matches.length ? new Set(this.matches.map(({block}) => block)) : null;
    const {none, form} = this.data.find;
    if (!found) by("found").textContent = form;
    else if (!found.length && this.sought) by("found").textContent = none.replace("{text}", this.sought);
    else this.#count();
    this.#mark(moving);
  }

  /** The match after the one that this returned last, or before it if `step` is -1; undefined without matches. */
  nextFound(step) {
    const {length} = this.matches;
    this.#match = this.#match < 0 && step < 0 ? length - 1 : (this.#match + step + length) % length;
    this.#count();
    return this.matches[this.#match];
  }

  #count() {
    const {length} = this.matches;
    const place = this.#match < 0 ? "" : `${this.#match + 1} of `;
    by("found").textContent = length ? `${place}${length} ${length === 1 ? "match" : "matches"}` : "";
  }

  /** Notes which blocks the marks dim. */
  #mark(moving = false) {
    const {marks} = this;
    this.#eachTrack((track) => {
      track.dims = marks.any ? Uint8Array.from(track.blocks, (block) => marks.dims(block)) : null;
    });
    this.repaint();
    this.#tell(moving ? "moving" : "marks");
  }

  #eachTrack(does) {
    for (const {rows} of this.data.timelines) for (const {tracks} of rows) tracks.forEach(does);
  }
}
