/* Palette: the actions that a reader can insert: those that are missing, and any other one. */

import {make} from "./controls.js";
import {letCarry} from "./drag.js";

const MOST = 40; // missing actions that are shown

export class Palette {
  #editor;
  #kind = make("select", {ariaLabel: "Kind of action", title: "Kind of the action to insert"});
  #stage = make("input", {type: "number", min: 0, value: 0, ariaLabel: "Stage", title: "Stage of the action to insert"});
  #microbatch = make("input", {
    type: "number", min: 0, value: 0, ariaLabel: "Microbatch", title: "Microbatch of the action to insert",
  });
  #any;
  #missing = make("span", {className: "choices"});

  constructor(editor) {
    this.#editor = editor;
    const entry = () => `${Number(this.#stage.value)}${this.#kind.value}${Number(this.#microbatch.value)}`;
    this.#any = this.#chip(entry);
    const update = () => { this.#any.textContent = entry(); };
    for (const each of [this.#kind, this.#stage, this.#microbatch]) each.addEventListener("input", update);
    const any = make("span", {className: "choices"},
      "Insert", this.#kind, "stage", this.#stage, "microbatch", this.#microbatch, this.#any);
    this.element = make("div", {id: "palette", role: "group", ariaLabel: "Actions to insert"}, any, this.#missing);
  }

  /** A button with an action: a pointer carries it into a timeline, or picks it up for the next click there; a key
   * inserts it behind the selected block, or at the end of its rank. */
  #chip(entry, rank = 0) {
    const editor = this.#editor;
    const title = "Insert behind the selected block; or drag it, or click it and then a place in the timeline";
    const chip = make("button", {type: "button", className: "chip", title});
    letCarry(editor, chip, entry);
    chip.addEventListener("click", (event) => {
      if (event.pointerType) this.arm(editor.armed === entry() ? null : entry(), chip);
      else if (editor.selected) editor.insert(entry(), {...editor.selected, index: editor.selected.index + 1}, "tell");
      else editor.insert(entry(), {rank, index: editor.rows[rank].length}, "tell");
    });
    return chip;
  }

  /** Lets the next click in the timeline insert `entry`; null: nothing. */
  arm(entry, chip = null) {
    this.#editor.armed = entry;
    for (const each of this.element.querySelectorAll(".chip")) each.ariaPressed = String(each === chip && entry !== null);
  }

  /** Shows the kinds of the data, and what is missing. */
  show({kinds}) {
    const {custom} = this.#editor;
    if (!this.#kind.length) {
      const names = Object.entries(kinds).map(([value, {name}]) => make("option", {value, textContent: `${value}: ${name}`}));
      this.#kind.append(...names);
    }
    this.#any.textContent = `${this.#stage.value}${this.#kind.value}${this.#microbatch.value}`;
    this.arm(null);
    const missing = custom?.missing ?? [];
    this.#missing.replaceChildren(missing.length ? "Missing" : "", ...missing.slice(0, MOST).map(({rank, text}) => {
      const chip = this.#chip(() => text, rank);
      return Object.assign(chip, {textContent: text, title: `Missing on rank ${rank}. ${chip.title}`});
    }), missing.length > MOST ? `and ${missing.length - MOST} more` : "");
  }

  /** Gives the focus to the first action that can be inserted, and describes a block in its controls. */
  focus(block) {
    this.#kind.value = block.action.match(/\D/)[0];
    [this.#stage.value, this.#microbatch.value] = [block.stage, block.microbatch];
    this.#any.textContent = block.action;
    (this.#missing.querySelector("button") ?? this.#kind).focus();
  }
}
