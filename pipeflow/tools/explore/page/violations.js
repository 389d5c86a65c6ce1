/* Violations: what is wrong with the reader's schedule, on its blocks and in a list. The sentences come from Python. */

import {arrow, within} from "./canvas.js";
import {make} from "./controls.js";
import {fault} from "./fit.js";
import {by} from "./page.js";
import {paintNumbers} from "./paint.js";

const FEW = 4; // violations whose makers are all pointed at; of more, only that of the selected block

export class Violations {
  #editor;
  #list = make("section", {id: "violations", hidden: true});
  #marks = new Map(); // per place with a violation, the element that stands on it

  constructor(editor) {
    this.#editor = editor;
    by("views").prepend(this.#list);
  }

  get #found() {
    const {violations = [], waits = []} = this.#editor.custom ?? {};
    const isTold = (wait) => violations.some(({rank, position}) => rank === wait.rank && position === wait.position);
    return [...violations, ...waits.filter((wait) => !isTold(wait))];
  }

  /** Shows the violations of what is drawn now. */
  show() {
    const editor = this.#editor;
    const {custom} = editor;
    const places = new Map();
    if (editor.spans) {
      for (const violation of this.#found) {
        const {rank, position, sentence} = violation;
        const span = editor.spanAt({rank, index: position});
        if (rank !== null && custom.violations.includes(violation)) places.set(`${rank} ${position ?? ""}`, span ?? {rank});
        for (const block of span?.blocks ?? []) block.notes.push(sentence);
      }
    }
    this.#marks = new Map([...places].map(([key, span]) => [span, this.#mark(key)]));
    this.#tell();
  }

  #mark(key) {
    const [rank, position] = key.split(" ");
    const mark = make("div", {className: "over wrong"});
    Object.assign(mark.dataset, {rank, position});
    return this.#editor.chart.element.appendChild(mark);
  }

  #tell() {
    const {custom} = this.#editor;
    this.#list.hidden = !this.#found.length;
    if (this.#list.hidden) {
      this.#list.replaceChildren();
      return;
    }
    const items = this.#found.map(({rank, position, sentence, maker}) => {
      const item = make("li", {}, sentence);
      if (position !== null) item.append(": ", this.#link({rank, position, text: custom.entries[rank][position]}));
      if (maker) item.append(" made by ", this.#link(maker));
      return item;
    });
    const parts = [make("h2", {textContent: "What is wrong"}), make("ol", {}, ...items)];
    if (custom.cycle.length) {
      const steps = [...custom.cycle, custom.cycle[0]].flatMap((place, index) => [index ? " \u2192 " : "", this.#link(place)]);
      parts.push(make("p", {id: "cycle"}, "Deadlock: each would have to run before the next: ", ...steps));
    }
    this.#list.replaceChildren(...parts);
  }

  /** A button that goes to a block. */
  #link({rank, position, text}) {
    const link = make("button", {type: "button", className: "link", title: "Go to this block"});
    link.textContent = `${text} (rank ${rank})`;
    link.addEventListener("click", () => this.#editor.goTo({rank, index: position}));
    return link;
  }

  /** Paints over the timeline of the editor: what can never run, the makers, and the cycle of a deadlock. */
  paint(context, chart, colours) {
    const {custom, spans, selected} = this.#editor;
    const {place} = chart;
    const {first} = this.#editor.page.view;
    const edge = {lane: 0, start: first, end: first}; // where what is missing in a row stands
    for (const [span, mark] of this.#marks) chart.frame(mark, span.blocks ? span : {...edge, ...span});
    within(context, [place.left, 0, place.width, place.height], () => {
      custom.stuck.forEach((first, rank) => { if (first !== null) this.#hatch(context, chart, rank, first, colours); });
      context.strokeStyle = context.fillStyle = fault();
      context.lineWidth = 1.75;
      const at = ({rank, position}) => spans[rank]?.[position];
      const ring = custom.cycle.map(at);
      ring.forEach((span, index) => join(context, place, ring.at(index - 1), span));
      context.setLineDash([3, 3]);
      for (const violation of this.#found) {
        const chosen = violation.rank === selected?.rank && violation.position === selected?.index;
        if (violation.maker && (chosen || (this.#found.length <= FEW && !custom.cycle.length))) {
          join(context, place, at(violation.maker), at(violation));
        }
      }
      context.setLineDash([]);
    });
  }

  /** Hatches the blocks of a rank that can never run. */
  #hatch(context, {timeline, place}, rank, first, colours) {
    const blocks = timeline.rows[rank].blocks.slice(first).filter((block) => !block.lane);
    if (!blocks.length) return;
    const [x, end] = [place.x(blocks[0].start), place.x(blocks.at(-1).end)];
    const {height} = place.lanes[0];
    const y = rank * place.pitch;
    within(context, [x, y, end - x, height], () => {
      context.globalAlpha = 0.55;
      context.fillStyle = colours.background;
      context.fillRect(x, y, end - x, height);
      context.globalAlpha = 0.3;
      context.strokeStyle = colours.text;
      context.lineWidth = 1;
      context.beginPath();
      for (let left = Math.max(x, place.left - height) - height; left < Math.min(end, place.left + place.width); left += 7) {
        context.moveTo(left, y + height);
        context.lineTo(left + height, y);
      }
      context.stroke();
      const edges = blocks.map(({start, end}) => [place.x(start), place.x(end) - place.x(start) - 1]);
      paintNumbers(context, blocks, edges, place, {dims: () => false}, {ink: colours.text});
      context.globalAlpha = 1;
    });
  }
}

/** An arrow from the middle of one span to that of another; on one rank, a bow below the lane. */
function join(context, place, from, to) {
  if (!from || !to) return;
  const middle = ({start, end}) => place.x((start + end) / 2);
  const {height} = place.lanes[0];
  const [x, end, y, tip] = [middle(from), middle(to), place.y(from), place.y(to)];
  if (from.rank === to.rank) {
    context.beginPath();
    context.moveTo(x, y + height);
    context.quadraticCurveTo((x + end) / 2, y + height + 18, end, tip + height);
    context.stroke();
    arrow(context, [end + (x < end ? -4 : 4), tip + height + 4], [end, tip + height], 7);
  } else {
    const down = to.rank > from.rank;
    arrow(context, [x, y + (down ? height : 0)], [end, tip + (down ? 0 : height)], 7);
  }
}
