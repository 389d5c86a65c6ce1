/* Scatter: the plot of all schedules, which Python draws. A click on a point, or on a name, shows that schedule. */

import {addBeside, namesIn, showFirst} from "./beside.js";
import {make} from "./controls.js";
import {by} from "./page.js";

const HINT = "Click a point, or go to it with Tab and the arrow keys and press Enter, to show its schedule; "
  + "with Shift, beside the others.";
const STEPS = {ArrowLeft: -1, ArrowUp: -1, ArrowRight: 1, ArrowDown: 1};

/** The name that a click on an element means: of several at one point, the one after the one that is shown first. */
function nameAt(element, link) {
  const {name, names} = element.closest("[data-name], [data-names]")?.dataset ?? {};
  const all = names?.split(",") ?? [];
  return name ?? all[(all.indexOf(namesIn(link)[0]) + 1) % all.length];
}

/** Lets only the mark `chosen` have the focus by Tab. */
function rove(marks, chosen) {
  for (const mark of marks) mark.setAttribute("tabindex", mark === chosen ? 0 : -1);
}

/** Names the marks for those who do not see them. Returns them from left to right. */
function prepare(plot, measures) {
  plot.querySelector("svg").setAttribute("role", "group");
  const marks = [...plot.querySelectorAll("[data-names]")];
  for (const mark of marks) {
    const said = mark.dataset.names.split(",").map((name) => `${name}: ${measures[name].said}`).join("; ");
    mark.setAttribute("role", "button");
    mark.setAttribute("aria-label", said);
    mark.setAttribute("aria-pressed", mark.classList.contains("marked"));
    mark.querySelector("title").textContent = said;
  }
  return marks.sort((one, other) => one.cx.baseVal.value - other.cx.baseVal.value);
}

export function showScatter(shared) {
  const {table, link, server} = shared;
  const made = new Set(table.filter((field) => !field.shown).map((field) => field.name));
  const plot = make("div", {className: "plot"});
  const notes = make("ul", {className: "notes"});
  const hint = make("p", {className: "notes", textContent: HINT});
  const section = make("section", {id: "scatter", ariaLabel: "All schedules", hidden: true}, plot, hint, notes);
  by("all").append(section);
  let marks = [];

  const choose = (element, beside) => {
    const name = nameAt(element, link);
    if (!name) return;
    if (beside) addBeside(shared, name);
    else showFirst(link, name);
  };
  plot.addEventListener("click", (event) => choose(event.target, event.shiftKey));
  plot.addEventListener("keydown", (event) => {
    const at = marks.indexOf(event.target);
    if (at < 0 || event.ctrlKey || event.metaKey || event.altKey) return;
    const next = marks[at + (STEPS[event.key] ?? 0)];
    if (event.key === "Enter" || event.key === " ") choose(event.target, event.shiftKey);
    else if (event.key in STEPS && next) { rove(marks, next); next.focus(); }
    else if (!(event.key in STEPS)) return;
    event.preventDefault();
    event.stopPropagation();
  });

  const show = (answer) => {
    const name = document.activeElement?.closest?.("#scatter [data-names]")?.dataset.names.split(",")[0];
    plot.innerHTML = answer.plot;
    section.hidden = false;
    section.classList.remove("stale");
    notes.replaceChildren(...answer.notes.map((textContent) => make("li", {textContent})));
    marks = answer.plot ? prepare(plot, answer.measures) : [];
    const same = name && marks.find((mark) => mark.dataset.names.split(",").includes(name));
    rove(marks, same ?? marks.find((mark) => mark.classList.contains("marked")) ?? marks[0]);
    same?.focus({preventScroll: true});
  };
  let asked = null; // the fields that were asked last
  const ask = (fields) => {
    asked = fields;
    const width = Math.max(Math.floor(by("views").clientWidth), 280);
    server.follow("compare", {...fields, width}, show, () => section.classList.add("stale"));
  };
  link.listen((fields, changed) => {
    if (!asked || changed.some((name) => made.has(name))) ask(fields);
  });
  let width = 0;
  new ResizeObserver(() => {
    const wide = by("views").clientWidth;
    if (width && Math.abs(wide - width) > 40 && !section.classList.contains("stale")) ask(asked);
    width = wide;
  }).observe(by("views"));
}
