/* Controls: a form made from the table of fields. A number has a box and, if its range is known, a slider. */

const GROUPS = new Map();

export function make(name, properties = {}, ...children) {
  const element = Object.assign(document.createElement(name), properties);
  element.append(...children);
  return element;
}

/** The group of controls that a field stands in. Those that are not needed at first are folded. */
function groupOf(form, {group, fold}) {
  const textContent = fold || group;
  const made = () => (fold ? make("details", {}, make("summary", {textContent, title: `Show or hide: ${textContent}`}))
    : make("fieldset", {}, make("legend", {textContent})));
  if (!GROUPS.has(textContent)) GROUPS.set(textContent, form.appendChild(made()));
  return GROUPS.get(textContent);
}

/** A control for a field: its row in the form, and a function that shows a value. */
function makeControl(field, link) {
  const id = `field-${field.name}`;
  const set = (value, moving = false) => link.set({[field.name]: value}, {moving});
  const title = field.help[0].toUpperCase() + field.help.slice(1);
  const label = make("label", {htmlFor: id, textContent: field.label, title});
  if (field.kind === "names" || field.kind === "choice") {
    const choices = field.default ? field.choices : ["", ...field.choices];
    const options = choices.map((name) => make("option", {value: name, textContent: name || field.absent}));
    const select = make("select", {id, title}, ...options);
    const others = () => (field.kind === "names" ? link.get(field.name).split(",").slice(1) : []);
    select.addEventListener("change", () => set([...new Set([select.value, ...others()])].join(",")));
    return {row: make("div", {className: "control"}, label, select), show: (value) => { select.value = value.split(/[,:]/)[0]; }};
  }
  if (field.kind === "flag") {
    const tick = make("input", {id, title, type: "checkbox"});
    tick.addEventListener("change", () => set(tick.checked ? "1" : ""));
    return {row: make("div", {className: "control"}, label, tick), show: (value) => { tick.checked = value === "1"; }};
  }
  const inputMode = ["numbers", "stages"].includes(field.kind) ? "text" : "decimal";
  const box = make("input", {id, title, type: "text", inputMode, placeholder: field.absent});
  box.addEventListener("change", () => set(box.value.trim()));
  if (!field.most) {
    return {row: make("div", {className: "control wide"}, label, box), show: (value) => { box.value = value; }};
  }
  const {least: min, most: max, step} = field;
  const slider = make("input", {type: "range", min, max, step, title, ariaLabel: field.label, tabIndex: -1});
  slider.addEventListener("input", () => set(slider.value, true));
  slider.addEventListener("change", () => set(slider.value));
  box.addEventListener("keydown", (event) => { // as in the slider, so that Tab need not go to both
    const more = {ArrowUp: step, ArrowDown: -step}[event.key];
    const number = Number(box.value || slider.value) + more;
    if (Number.isNaN(number)) return;
    event.preventDefault();
    set(String(Number(Math.max(number, min).toPrecision(9))), true);
  });
  box.addEventListener("blur", () => set(link.get(field.name))); // ends the movement
  const none = ["none", "no limit"].includes(field.absent) ? max : min;
  const show = (value) => { box.value = value; slider.value = value || none; };
  return {row: make("div", {className: "control"}, label, slider, box), show};
}

export function makeControls({table, link}) {
  const form = document.getElementById("controls");
  form.addEventListener("submit", (event) => event.preventDefault());
  const fold = document.getElementById("fold"); // shown where there is little room
  fold.addEventListener("click", () => fold.setAttribute("aria-expanded", fold.ariaExpanded !== "true"));
  const controls = table.filter((field) => field.group).map((field) => {
    const control = makeControl(field, link);
    groupOf(form, field).append(control.row);
    return {field, ...control};
  });
  link.listen((fields, changed) => {
    const kindOf = (name) => name.startsWith("file:") ? "file" : name;
    const names = link.get("schedule").split(",").map(kindOf).filter((name) => !name.includes(":"));
    const modelled = link.get("model") !== "";
    for (const {field, row, show} of controls) {
      const applies = field.model === null || field.model === modelled;
      const taken = !field.takers.length || names.some((name) => field.takers.includes(name)) || link.fields[field.beside];
      row.hidden = !(applies && taken);
      show(link.get(field.name));
      if (fields[field.name] && changed.includes(field.name) && field.fold) row.parentElement.open = true;
    }
    for (const group of GROUPS.values()) group.hidden = !group.querySelector(".control:not([hidden])");
  });
}
