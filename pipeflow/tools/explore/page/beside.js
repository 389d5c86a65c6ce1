/* Beside: which schedules stand side by side, and how they differ from the first one. Python finds what differs. */

import {make} from "./controls.js";
import {by} from "./page.js";

export const namesIn = (link) => link.get("schedule").split(",");

/** Sets the names that are shown, each once. */
export function showNames(link, names, more = {}, how = {}) {
  link.set({...more, schedule: [...new Set(names)].join(",")}, how);
}

/** Shows a schedule instead of the first one. */
export function showFirst(link, name) {
  showNames(link, [name, ...namesIn(link).slice(1)]);
}

/** Shows a schedule beside the others. If it is shown already, that one keeps the options that it has now. */
export function addBeside({link, shown}, name) {
  const kept = (each) => shown.answer?.own[shown.answer.schedules.indexOf(each)] ?? each;
  showNames(link, [...namesIn(link).map((each) => (each === name ? kept(each) : each)), name]);
}

/** A name of the link for people. */
export const labelOf = (link, name) => {
  const file = name === "custom" ? link.get("rows_file") : "";
  return name.replace(/^file:/, "").replace(/:/g, " ").trim() + (file && ` (${file})`);
};

/** The name of a schedule or a file with a button that removes it, if it is not the last one. */
function chip(link, name, number, names) {
  const label = labelOf(link, name);
  const title = `Remove ${label}`;
  const remove = make("button", {type: "button", textContent: "\u00d7", title, ariaLabel: title});
  remove.addEventListener("click", () => showNames(link, names.filter((_, other) => other !== number)));
  return make("li", {}, label, ...(names.length > 1 ? [remove] : []));
}

function makeAdder(shared, choices) {
  const none = make("option", {value: "", textContent: "Add beside \u2026"});
  const options = choices.map((name) => make("option", {textContent: name}));
  const title = "Draw another schedule below the first one, on the same time scale";
  const select = make("select", {id: "add", title, ariaLabel: "Add a schedule beside"}, none, ...options);
  select.addEventListener("change", () => {
    const name = select.value;
    select.value = "";
    if (name) addBeside(shared, name);
  });
  return select;
}

function markMoved(page, {moved}) {
  moved.forEach((rows, number) => rows?.forEach((text, rank) => {
    const actions = new Set(text.split(" "));
    for (const block of page.charts[number].timeline.rows[rank].blocks) block.moved = actions.has(block.action);
  }));
}

export function showBeside(shared) {
  const {table, link, page, shown} = shared;
  const chips = make("ul", {className: "chips", ariaLabel: "Shown"});
  const tick = make("input", {type: "checkbox", id: "differences"});
  const title = "Hatch actions whose position differs from the first timeline";
  const toggle = make("label", {title}, tick, " Differences");
  const place = make("div", {id: "compared"});
  by("tools").append(chips, makeAdder(shared, table.find(({name}) => name === "schedule").choices), toggle);
  by("views").append(place);
  tick.addEventListener("change", () => link.set({differences: tick.checked ? "" : "off"}));
  link.listen(() => {
    const names = namesIn(link);
    chips.replaceChildren(...names.map((name, number) => chip(link, name, number, names)));
    toggle.hidden = names.length < 2;
    tick.checked = link.get("differences") === "on";
    page.marks.differences = tick.checked && names.length > 1 && link.get("wipe") === "";
    page.repaint();
  });
  shown.listen((answer) => {
    place.innerHTML = answer.differences;
    markMoved(page, answer);
  });
}
