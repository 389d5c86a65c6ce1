/* Focus: when what has the focus is removed, hidden or disabled, what stands in its place gets it. */

const CONTROLS = "button, select, summary, textarea, input:not([type=file]), canvas[tabindex]";

const isUsable = (element) => element.isConnected && !element.disabled && element.checkVisibility();
const nameOf = (element) => element.id || element.ariaLabel || element.textContent;

function controlsOf(element) {
  return [...element.querySelectorAll(CONTROLS)].filter(isUsable);
}

/** The places of an element among the controls of what it stands in, from the inside to the outside. */
function trailOf(element) {
  const trail = [];
  for (let home = element.parentElement; home; home = home.parentElement) {
    trail.push({home, index: controlsOf(home).indexOf(element)});
  }
  return trail;
}

/** The control of the same name where an element was, or else the one at its place. */
function inPlaceOf({name, trail}) {
  for (const {home, index} of trail) {
    const controls = home.isConnected ? controlsOf(home) : [];
    if (controls.length) return controls.find((each) => nameOf(each) === name) ?? controls[Math.min(index, controls.length - 1)];
  }
  return null;
}

export function keepFocus() {
  let last = null; // what has the focus, and where it stands
  const note = (element) => { last = {element, name: nameOf(element), trail: trailOf(element)}; };
  document.addEventListener("focusin", ({target}) => note(target));
  document.addEventListener("pointerdown", () => { last = null; });
  document.addEventListener("click", () => { // by a pointer: what it pressed may disappear, too
    const {activeElement} = document;
    if (!last && activeElement !== document.body) note(activeElement);
  }, {capture: true});
  new MutationObserver(() => {
    const {activeElement} = document;
    if (!last || isUsable(last.element) || ![document.body, last.element].includes(activeElement)) return;
    const next = inPlaceOf(last);
    last = null;
    next?.focus({preventScroll: true});
  }).observe(document.body, {subtree: true, childList: true, attributeFilter: ["hidden", "disabled", "open"]});
}
