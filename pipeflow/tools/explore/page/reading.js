/* Reading: what a reader marked, coloured, selected and zoomed to is in the link; the boxes of the selected range of time,
 * and what every rank does in it. */

import {make} from "./controls.js";
import {by} from "./page.js";

const PAUSE = 250; // milliseconds without a change until the link has the view

/** A time as a link has it: in the unit of the page, to six digits. */
function written({data}, time) {
  return String(Number((time * data.factor).toPrecision(6)));
}

/** What the page shows, as fields. */
function fieldsOf(page) {
  const {marks, mode, sought, selection} = page;
  return {
    path: marks.path ? "1" : "", follow: marks.way === null ? "" : String(marks.way), find: sought, colour: mode,
    from: selection ? written(page, selection.first) : "", to: selection ? written(page, selection.last) : "",
  };
}

function zoomOf(page) {
  return page.length < page.horizon ? `${written(page, page.view.first)},${written(page, page.view.last)}` : "";
}

/** Lets the page show what the fields say. */
function apply(page, link) {
  const numbers = (name) => (link.get(name) ? link.get(name).split(",").map(Number) : []);
  const time = (number) => number / page.data.factor;
  const [[from], [to], [way], [first, last]] = ["from", "to", "follow", "zoom"].map(numbers);
  page.colourBy(link.get("colour"));
  page.showPath(link.get("path") === "1");
  page.follow(way ?? null);
  page.find(link.get("find"));
  const selected = from !== undefined || to !== undefined;
  page.select(selected ? time(from ?? 0) : null, to === undefined ? page.horizon : time(to));
  if (last > first) page.show(time(first), time(last - first));
  else page.showAll();
}

export function readTimelines({link, server, page, shown}) {
  let ready = false; // whether the page shows what the link says
  let timer = 0;
  const follow = () => {
    ready = false;
    apply(page, link);
    ready = true;
  };
  shown.listen(() => { if (!ready) follow(); });
  link.listen((fields, changed) => {
    if (!page.data) return;
    const differs = Object.entries(fieldsOf(page)).some(([name, value]) => value !== link.get(name));
    if (differs || changed.includes("zoom")) follow();
  });
  page.listen((change) => {
    if (!ready) return;
    clearTimeout(timer);
    timer = setTimeout(() => link.set({zoom: zoomOf(page)}, {aside: true}), PAUSE);
    if (change !== "view") link.set(fieldsOf(page), {moving: change === "moving"});
  });
  showSelection({link, server, page, shown});
}

/** The boxes of the selected range, and the table of ranks below the timelines. */
function showSelection({link, server, page, shown}) {
  const box = (name, label, title) => {
    const input = make("input", {type: "text", inputMode: "decimal", id: `select-${name}`, className: "time", title});
    input.addEventListener("change", () => link.set({[name]: input.value.trim()}));
    return [make("label", {htmlFor: input.id, textContent: label}), input];
  };
  const [from, to] = [
    box("from", "Select", "Start of the selected range of time, in the unit of the axis"),
    box("to", "to", "End of the selected range of time, in the unit of the axis"),
  ];
  const zoom = make("button", {type: "button", textContent: "Zoom", title: "Show the selected range (Z)"});
  const clear = make("button", {type: "button", textContent: "Clear", title: "Select nothing (Escape)", id: "unselect"});
  zoom.addEventListener("click", () => page.showSelected());
  clear.addEventListener("click", () => page.select(null));
  by("tools").append(make("span", {className: "selection"}, ...from, ...to, zoom, clear));

  const title = make("summary", {textContent: "Ranks in the whole step", title: "What each rank does in the selected range"});
  const tables = make("div");
  const details = make("details", {id: "window", className: "ranks"}, title, tables);
  by("views").append(details);
  const tell = (answer) => { [title.textContent, tables.innerHTML] = [answer.title, answer.tables]; };
  const ask = () => {
    if (details.open && page.data) server.follow("window", link.fields, tell, (message) => { tables.textContent = message; });
  };
  const show = () => {
    const selected = link.get("from") !== "" || link.get("to") !== "";
    zoom.hidden = clear.hidden = !selected;
    for (const [[, input], name] of [[from, "from"], [to, "to"]]) {
      if (document.activeElement !== input) input.value = link.get(name);
    }
    from[1].placeholder = "0";
    to[1].placeholder = page.data ? written(page, page.horizon) : "";
    if (selected) details.open = true;
  };
  details.addEventListener("toggle", ask);
  shown.listen(() => { show(); ask(); });
  link.listen((_, changed) => {
    show();
    if (changed.includes("from") || changed.includes("to")) ask();
  });
}
