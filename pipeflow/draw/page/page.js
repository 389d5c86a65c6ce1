/* Page: its timelines, the part of them in view, and the marks. Must not contain: how it looks, and which pointers and
 * keys change it. */

import {prepared, scheme} from "./canvas.js";
import {wayOf} from "./data.js";
import {AXIS, layOut, margins} from "./geometry.js";
import {paintAxis, paintGround, paintLanes, paintLinks} from "./paint.js";
import {saidTime, saidWay} from "./words.js";

export const by = (id) => document.getElementById(id);

/** The marks: the critical path, or the `way` of a microbatch. */
class Marks {
  path = false;
  way = null;

  /** Whether something else than this block is marked. */
  dims(block) {
    if (!this.path && this.way === null) return false;
    return !(this.path && block.critical) && (this.way === null || block.followed !== this.way);
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
  paint({data, view, marks, density, margins}, colours) {
    const {timeline, element} = this;
    const wide = element.clientWidth;
    const place = this.place = layOut(timeline, view, wide, margins);
    const sharp = density ?? window.devicePixelRatio;
    paintAxis(prepared(this.axis, wide, AXIS, sharp), data, place, view, colours);
    const context = prepared(this.lanes, wide, place.height, sharp);
    paintGround(context, data, timeline, place, view, colours);
    const dense = paintLanes(context, timeline, place, view, marks, colours);
    if (marks.way !== null) paintLinks(context, marks.steps(wayOf(timeline, marks.way)), place, colours.text, 1.25);
    if (marks.path) paintLinks(context, marks.steps(timeline.path), place, colours.accent, 1.75);
    this.frame(this.focused, document.activeElement === this.lanes ? this.focus : null);
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
  #waiting = false;
  #listen;

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
    this.follow(this.marks.way);
  }

  get length() {
    return this.view.last - this.view.first;
  }

  repaint() {
    if (this.#waiting || !this.data) return;
    this.#waiting = true;
    requestAnimationFrame(() => { this.#waiting = false; this.paint(); });
  }

  paint() {
    const colours = scheme();
    document.documentElement.style.setProperty("--bar", `${document.querySelector(".bar").offsetHeight}px`);
    const dense = this.charts.map((chart) => chart.paint(this, colours)).some(Boolean);
    const [first, last] = [this.view.first, this.view.last].map((time) => saidTime(this.data, time));
    by("view").textContent = `${first} to ${last}${dense ? "; colours are mixed where blocks are too small" : ""}`;
  }

  /** Shows the time from `first` on for `length`, within the step. */
  show(first, length) {
    const span = Math.min(Math.max(length, this.narrowest), this.horizon);
    this.view.first = Math.min(Math.max(first, 0), this.horizon - span);
    this.view.last = this.view.first + span;
    this.repaint();
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

  showPath(on) {
    this.marks.path = by("path").checked = on;
    this.repaint();
  }

  /** Follows a microbatch through the ranks; null: none. */
  follow(microbatch) {
    this.marks.way = microbatch;
    by("forget").hidden = microbatch === null;
    const ways = this.data.timelines.map((timeline) => wayOf(timeline, microbatch));
    by("way").textContent = microbatch === null ? "" : saidWay(this.data, microbatch, ways);
    this.repaint();
  }
}
