/* Toolbars: each is one stop of Tab, and the arrow keys go from one of its controls to the next. */

import {by} from "./page.js";

const STEPS = {ArrowLeft: -1, ArrowRight: 1};
const CONTROLS = "button, select, summary, input:not([type=file], [type=range])";

/** The controls of a toolbar that can be used now, without those of a toolbar or an open menu inside it. */
function controlsOf(toolbar) {
  const usable = (each) => !each.disabled && each.checkVisibility() && each.closest("[role=toolbar], .menu > div") === toolbar;
  return [...toolbar.querySelectorAll(CONTROLS)].filter(usable);
}

/** Whether an arrow key moves the cursor in a text. */
function moves({target, key}) {
  if (!target.matches("input:not([type=checkbox])") || target.type === "number") return false;
  const end = key === "ArrowRight" ? target.value.length : 0;
  return target.selectionStart !== end || target.selectionEnd !== end;
}

/** Lets only one control of a toolbar have the focus by Tab: `chosen`, or the one that had it last. */
function rove(toolbar, chosen = null) {
  const controls = controlsOf(toolbar);
  const one = chosen ?? controls.find((each) => each.tabIndex === 0) ?? controls[0];
  for (const each of controls) each.tabIndex = each === one ? 0 : -1;
}

function listen(toolbar) {
  toolbar.addEventListener("focusin", ({target}) => { if (controlsOf(toolbar).includes(target)) rove(toolbar, target); });
  toolbar.addEventListener("keydown", (event) => {
    const controls = controlsOf(toolbar);
    const at = controls.indexOf(event.target);
    if (at < 0 || !(event.key in STEPS) || event.ctrlKey || event.altKey || event.metaKey || moves(event)) return;
    event.preventDefault();
    event.stopPropagation();
    controls[(at + STEPS[event.key] + controls.length) % controls.length].focus();
  });
  const changes = {subtree: true, childList: true, attributes: true, attributeFilter: ["hidden", "disabled", "open"]};
  new MutationObserver(() => rove(toolbar)).observe(toolbar, changes);
  rove(toolbar);
}

export function makeToolbars() {
  for (const menu of document.querySelectorAll(".help, .menu")) {
    menu.addEventListener("keydown", (event) => {
      if (event.key !== "Escape" || !menu.open) return;
      event.stopPropagation();
      menu.open = false;
      menu.querySelector("summary").focus();
    });
    document.addEventListener("pointerdown", ({target}) => { if (!menu.contains(target)) menu.open = false; });
  }
  by("skip").addEventListener("click", () => document.querySelector(".lanes")?.focus());
  document.querySelectorAll("[role=toolbar]").forEach(listen);
}
