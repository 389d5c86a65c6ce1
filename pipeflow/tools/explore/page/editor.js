/* Editor: the reader's schedule `custom`: its rows as the link has them, where they are drawn, and the edits of them. Every
 * edit is a step of the link, which the browser undoes. Must not contain: buttons and keys. */

import {focusOn} from "./keys.js";
import {unpoint} from "./pointers.js";
import {format, inserted, landing, moved, paired, parse, removed} from "./rows.js";
import {say} from "./tip.js";

export const CUSTOM = "custom";

export class Editor {
  rows = []; // per rank, its entries
  custom = null; // what Python says about them
  selected = null; // the place of an entry
  spans = null; // per rank and entry {rank, lane, start, end, blocks}, once these rows are drawn
  chart = null;
  armed = null; // the entry that the next click in a timeline inserts
  #after = null; // how to show the selected entry once it is drawn
  #said = "";

  constructor({link, page}) {
    Object.assign(this, {link, page});
    link.listen((_, changed) => {
      const rows = parse(link.get("rows"));
      this.rows = this.custom?.entries.map((_, rank) => rows[rank] ?? []) ?? rows;
      if (!changed.includes("rows")) return;
      this.armed = null;
      this.spans = null;
    });
  }

  get on() {
    return this.link.get("edit") === "1" && this.link.get("schedule").split(",").includes(CUSTOM);
  }

  /** Whether the timeline can be edited by its blocks: it shows the rows as they are now. */
  canEdit(chart) {
    return this.on && chart === this.chart && this.spans !== null;
  }

  entry({rank, index}) {
    return this.rows[rank]?.[index];
  }

  /** The place of a block's entry. */
  placeOf(block) {
    return {rank: block.rank, index: this.custom.places[block.rank][block.index]};
  }

  spanAt(place) {
    return this.spans?.[place.rank]?.[place.index];
  }

  /** Takes an answer to `fields` that was put onto the page. */
  show({custom, schedules}, fields) {
    this.custom = custom ?? null;
    this.chart = custom ? this.page.charts[schedules.indexOf(CUSTOM)] : null;
    this.spans = null;
    if (!custom || (fields.rows ?? "") !== this.link.get("rows")) return;
    this.rows = custom.entries;
    this.spans = this.rows.map((row, rank) => row.map(() => ({rank, lane: 0, start: 0, end: 0, blocks: []})));
    for (const {blocks} of this.chart.timeline.rows) {
      for (const block of blocks) {
        const place = this.placeOf(block);
        const span = this.spanAt(place);
        if (!span.blocks.length) Object.assign(span, {lane: block.lane, start: block.start});
        span.end = block.end;
        span.blocks.push(block);
      }
    }
    this.#showSelected();
  }

  #showSelected() {
    const [after, said] = [this.#after, this.#said];
    this.#after = null;
    this.#said = "";
    const block = this.selected && this.spanAt(this.selected)?.blocks[0];
    if (!block) this.selected = null;
    this.chart.focus = block ?? null;
    if (after && block) {
      if (after === "hold") this.page.held = this.chart; // a key pressed a button, which keeps the focus
      else if (after === "tell") focusOn(this.page, this.chart, block);
      else this.chart.lanes.focus({preventScroll: true});
    }
    if (said) say([said, ...(block?.notes ?? [])].join(" "));
  }

  /** Selects the entry of a block. */
  select(block) {
    this.chart.focus = block;
    this.chart.lanes.focus({preventScroll: true});
    this.page.repaint();
  }

  /** Goes to an entry: brings it into view and describes it. */
  goTo(place) {
    const block = this.spanAt(place)?.blocks[0];
    if (block) focusOn(this.page, this.chart, block);
  }

  #set(rows, selected, said, after) {
    unpoint(this.page);
    this.selected = selected;
    this.#after = document.activeElement.matches("#editor > button:focus-visible") ? "hold" : after;
    this.#said = said;
    this.link.set({rows: format(rows)});
  }

  /** Moves an entry into a gap. `after`: "tell" also describes it there. */
  move(from, gap, after = "focus") {
    const to = landing(from, gap);
    if (to.rank === from.rank && to.index === from.index) return;
    const said = `${this.entry(from)} is now at position ${to.index} of rank ${to.rank}.`;
    this.#set(moved(this.rows, from, gap), to, said, after);
  }

  insert(entry, gap, after = "focus") {
    const said = `${entry} inserted at position ${gap.index} of rank ${gap.rank}.`;
    this.#set(inserted(this.rows, gap, entry), gap, said, after);
  }

  remove(at) {
    const left = {rank: at.rank, index: Math.max(Math.min(at.index, this.rows[at.rank].length - 2), 0)};
    this.#set(removed(this.rows, at), left, `${this.entry(at)} removed from rank ${at.rank}.`, "tell");
  }

  canPair(at) {
    return paired(this.rows, at) !== null;
  }

  /** Makes a pair of an entry and the one behind it, or splits it if it is a pair. */
  pair(at) {
    const rows = paired(this.rows, at);
    if (rows === null) return;
    const split = rows[at.rank].length > this.rows[at.rank].length;
    this.#set(rows, at, split ? `${this.entry(at)} is split.` : `${rows[at.rank][at.index]} is a pair.`, "focus");
  }

  /** Removes all entries. */
  empty() {
    this.#set(this.rows.map(() => []), null, "All blocks removed.", null);
  }

  /** Moves the view when a pointer carries something to its edge. */
  pan({clientX}) {
    const {place, lanes} = this.chart;
    const x = clientX - lanes.getBoundingClientRect().left - place.left;
    if (x < 24) this.page.move(-0.02);
    if (x > place.width - 24) this.page.move(0.02);
  }

  /** The gap of a rank's row at a time: behind the computations whose middle is before it. */
  gapAt(rank, time) {
    const row = this.spans[rank];
    const isPast = ({start, end}) => (start + end) / 2 <= time;
    return {rank, index: row.every(isPast) ? row.length : row.findLastIndex((span) => !span.lane && isPast(span)) + 1};
  }
}

