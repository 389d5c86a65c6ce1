/* Controls: a form made from the table of fields. A number has a box and, if its range is known, a slider. */

const GROUPS = new Map();

export function make(name, properties = {}, ...children) {
  const element = Object.assign(document.createElement(name), properties);
  element.append(...children);
  return element;
}

/** The group of controls that a field stands in. */
function groupOf(form, title) {
  if (!GROUPS.has(title)) GROUPS.set(title, form.appendChild(make("fieldset", {}, make("legend", {textContent: title}))));
  return GROUPS.get(title);
}

/** A control for a field: its row in the form, and a function that shows a value. */
function makeControl(field, link) {
  const id = `field-${field.name}`;
  const set = (value, moving = false) => link.set({[field.name]: value}, {moving});
  const label = make("label", {htmlFor: id, textContent: field.label, title: field.help});
  if (field.kind === "names" || field.kind === "choice") {
    const choices = field.default ? field.choices : ["", ...field.choices];
    const none = field.takers.length ? "default" : "none";
    const select = make("select", {id}, ...choices.map((name) => make("option", {value: name, textContent: name || none})));
    const others = () => (field.kind === "names" ? link.get(field.name).split(",").slice(1) : []);
    select.addEventListener("change", () => set([...new Set([select.value, ...others()])].join(",")));
    return {row: make("div", {className: "control"}, label, select), show: (value) => { select.value = value.split(/[,:]/)[0]; }};
  }
  if (field.kind === "flag") {
    const tick = make("input", {id, type: "checkbox"});
    tick.addEventListener("change", () => set(tick.checked ? "1" : ""));
    return {row: make("div", {className: "control"}, label, tick), show: (value) => { tick.checked = value === "1"; }};
  }
  const inputMode = field.kind === "numbers" ? "text" : "decimal";
  const placeholder = field.takers.length || field.model ? "auto" : "none";
  const box = make("input", {id, type: "text", inputMode, placeholder});
  box.addEventListener("change", () => set(box.value.trim()));
  if (!field.most) {
    return {row: make("div", {className: "control wide"}, label, box), show: (value) => { box.value = value; }};
  }
  const {least: min, most: max, step} = field;
  const slider = make("input", {type: "range", min, max, step, ariaLabel: field.label});
  slider.addEventListener("input", () => { box.value = slider.value; set(slider.value, true); });
  slider.addEventListener("change", () => set(slider.value));
  const show = (value) => { box.value = value; slider.value = value || min; };
  return {row: make("div", {className: "control"}, label, slider, box), show};
}

export function makeControls({table, link}) {
  const form = document.getElementById("controls");
  form.addEventListener("submit", (event) => event.preventDefault());
  const fold = document.getElementById("fold"); // shown where there is little room
  fold.addEventListener("click", () => fold.setAttribute("aria-expanded", fold.ariaExpanded !== "true"));
  const controls = table.filter((field) => field.group).map((field) => {
    const control = makeControl(field, link);
    groupOf(form, field.group).append(control.row);
    return {field, ...control};
  });
  link.listen(() => {
    const names = link.get("schedule").split(",").filter((name) => !name.includes(":"));
    const modelled = link.get("model") !== "";
    for (const {field, row, show} of controls) {
      const applies = field.model === null || field.model === modelled;
      row.hidden = !applies || (field.takers.length > 0 && !names.some((name) => field.takers.includes(name)));
      if (!row.contains(document.activeElement)) show(link.get(field.name));
    }
  });
}
