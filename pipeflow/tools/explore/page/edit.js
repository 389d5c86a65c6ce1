/* Edit: the mode in which a reader builds a schedule by hand: its buttons, its keys and what they say. */

import {make} from "./controls.js";
import {followPointer, listenToDrags} from "./drag.js";
import {CUSTOM, Editor} from "./editor.js";
import {by} from "./page.js";
import {Palette} from "./palette.js";
import {Violations} from "./violations.js";

const KEYS = { // for the help of the page
  "Alt and an arrow": "while editing: move the selected block in its row, or to another rank",
  P: "while editing: overlap the selected block with the one behind it, or split a pair",
  Delete: "while editing: remove the selected block",
  "Enter, Insert": "while editing: choose an action to insert behind the selected block",
  "Ctrl and Z, Y": "while editing: undo, redo",
};

/** Edits the selected entry as a key says. Returns whether the key has a meaning here. */
function press(editor, palette, event) {
  const at = editor.selected;
  if (event.ctrlKey || event.metaKey || at === null) return false;
  const {rank, index} = at;
  const count = editor.rows[rank].length;
  const beside = (other) => {
    if (editor.spans && editor.rows[other]) editor.move(at, editor.gapAt(other, editor.spanAt(at).start), "tell");
  };
  const moves = {
    ArrowLeft: () => { if (index) editor.move(at, {rank, index: index - 1}, "tell"); },
    ArrowRight: () => { if (index + 1 < count) editor.move(at, {rank, index: index + 2}, "tell"); },
    ArrowUp: () => beside(rank - 1),
    ArrowDown: () => beside(rank + 1),
  };
  const others = {
    p: () => editor.pair(at), P: () => editor.pair(at),
    Delete: () => editor.remove(at), Backspace: () => editor.remove(at),
    Insert: () => palette.focus(editor.chart.focus), Enter: () => palette.focus(editor.chart.focus),
  };
  const does = (event.altKey ? moves : others)[event.key];
  does?.();
  return does !== undefined;
}

function button(textContent, title, click) {
  const made = make("button", {type: "button", textContent, title});
  made.addEventListener("click", click);
  return made;
}

/** The buttons that change the rows, and a function that shows which of them apply to the selected block. */
function makeButtons(editor, link) {
  const onSelected = (text, title, act, ariaLabel = text) => {
    const made = button(text, title, () => { if (editor.selected) act(editor.selected); });
    return Object.assign(made, {ariaLabel});
  };
  const selected = [
    onSelected("\u25c0", "Move the selected block before the one before it (Alt and \u2190)",
      ({rank, index}) => { if (index) editor.move({rank, index}, {rank, index: index - 1}); }, "Move earlier"),
    onSelected("\u25b6", "Move the selected block behind the one behind it (Alt and \u2192)", (at) => {
      const {rank, index} = at;
      if (index + 1 < editor.rows[rank].length) editor.move(at, {rank, index: index + 2});
    }, "Move later"),
    onSelected("Remove", "Remove the selected block (Delete)", (at) => editor.remove(at)),
  ];
  const pair = onSelected("Pair", "Overlap the selected forward or backward with the block behind it, or split a pair (P)",
    (at) => editor.pair(at));
  const empty = button("Empty", "Remove all blocks, to begin anew", () => editor.empty());
  const undo = button("Undo", "Undo, as the browser's Back does (Ctrl and Z)", () => link.undo());
  const redo = button("Redo", "Redo, as the browser's Forward does (Ctrl and Y)", () => history.forward());
  const enable = () => {
    for (const each of selected) each.disabled = editor.selected === null;
    pair.disabled = editor.selected === null || !editor.canPair(editor.selected);
    undo.disabled = !link.steps;
  };
  return {buttons: [...selected, pair, empty, undo, redo], enable};
}

/** The button that searches for a better order, what it says about itself, and its result. */
function makeSearch({link, server, shown}) {
  const hint = "tries other orders for 2 s and takes the best sound one";
  const does = make("span", {id: "searches", className: "hint", textContent: hint});
  const result = make("p", {id: "result", role: "status"});
  let searched = ""; // the rows that the last search was about
  const search = button("Search from here", "", async () => {
    const before = link.get("rows");
    search.disabled = true;
    result.textContent = "Searching \u2026";
    try {
      const {fields, text} = await server.ask("search", {...link.fields, schedule: CUSTOM});
      if (fields && link.get("rows") === before) link.set({...fields, schedule: link.get("schedule")});
      searched = link.get("rows");
      result.textContent = `Search: ${text}.`;
    } catch (error) {
      result.textContent = error.message;
    }
    search.disabled = false;
  });
  search.setAttribute("aria-describedby", "searches");
  shown.listen((answer, fields) => { if (answer.custom && fields.rows !== searched) result.textContent = ""; });
  return {search, does, result};
}

/** Opens the editor on the first schedule, or on the reader's own one if there is one. */
async function begin({link, server, shown}) {
  const [first, ...others] = link.get("schedule").split(",");
  if (first === CUSTOM || others.includes(CUSTOM)) {
    link.set({edit: "1"});
    return;
  }
  try {
    const {fields} = await server.ask("start", {...link.fields, schedule: first});
    link.set({...fields, schedule: [CUSTOM, ...others].join(","), edit: "1"});
  } catch (error) {
    shown.refuse(error.message);
  }
}

function listenToKeys(editor, palette, link) {
  const keys = Object.entries(KEYS).flatMap(([key, text]) => [
    make("dt", {}, make("kbd", {textContent: key})), make("dd", {textContent: text}),
  ]);
  by("keys").append(...keys);
  window.addEventListener("keydown", (event) => {
    if (!editor.on) return;
    const typing = document.activeElement.matches("input, select");
    const undoes = (event.ctrlKey || event.metaKey) && !typing && "zZyY".includes(event.key);
    if (undoes) (event.shiftKey || event.key === "y" ? () => history.forward() : () => link.undo())();
    const pressed = undoes || (document.activeElement === editor.chart?.lanes && press(editor, palette, event));
    if (!pressed) return;
    event.preventDefault();
    event.stopPropagation();
  }, {capture: true});
}

export function showEditor(shared) {
  const {link, page, shown} = shared;
  const editor = new Editor(shared);
  const palette = new Palette(editor);
  const violations = new Violations(editor);
  const {buttons, enable} = makeButtons(editor, link);
  const {search, does, result} = makeSearch(shared);
  const status = make("p", {id: "status", role: "status"});
  const edit = button("Edit", "Build from the first schedule by hand", () => begin(shared));
  const done = button("Done", "Leave the editor; the schedule stays", () => link.set({edit: ""}));
  const tools = make("div", {id: "editor", hidden: true, role: "toolbar", ariaLabel: "Editor"},
    ...buttons, search, does, palette.element, status, result);
  by("tools").append(edit, done, tools);
  const option = make("option", {value: CUSTOM, textContent: "your own"});
  by("field-schedule").append(option);
  listenToDrags(editor, page);
  listenToKeys(editor, palette, link);

  link.listen((_, changed) => {
    if (changed.includes("edit")) page.repaint();
    edit.hidden = editor.on;
    done.hidden = tools.hidden = !editor.on;
    option.hidden = !link.get("rows") && !link.get("placement");
    enable();
  });
  shown.listen((answer, fields) => {
    editor.show(answer, fields);
    violations.show();
    palette.show(page.data);
    if (editor.chart) followPointer(editor);
    if (editor.custom) status.textContent = said(editor.custom);
    enable();
  });
  page.painters.push((context, chart, colours) => {
    if (!editor.canEdit(chart)) return;
    const selected = chart.focus && !chart.focus.gap ? editor.placeOf(chart.focus) : null;
    if (selected?.rank !== editor.selected?.rank || selected?.index !== editor.selected?.index) editor.selected = selected;
    enable();
    violations.paint(context, chart, colours);
  });
}

/** What the reader's schedule is, in one line. */
function said({sound, violations, stuck, same_as: names, bound_text: bound}) {
  if (!sound) {
    const waiting = stuck.filter((first) => first !== null).length;
    const ranks = waiting ? `; ${counted(waiting, "rank")} cannot go on` : "";
    return counted(violations.length, "violation") + ranks;
  }
  const known = names.length ? `This is ${names.join(", ")}. ` : "";
  return `Sound. ${known}${bound[0].toUpperCase()}${bound.slice(1)}.`;
}

function counted(number, noun) {
  return `${number} ${noun}${number === 1 ? "" : "s"}`;
}
