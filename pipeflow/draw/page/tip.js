/* Tip: the box beside the pointer that describes what is there, and the text that is read aloud. */

import {shadeOf} from "./data.js";
import {by} from "./page.js";
import {facts, saidGap, sentences} from "./words.js";

function element(name, text, more = {}) {
  return Object.assign(document.createElement(name), {textContent: text}, more);
}

function described({data, mode}, block) {
  if (block.gap) return [element("div", saidGap(data, block))];
  const title = element("h3", "");
  const swatch = document.createElement("i");
  swatch.style.background = block.kind.colours[mode][shadeOf(block, mode)];
  title.append(swatch, block.action, element("span", block.kind.name));
  const list = document.createElement("dl");
  for (const [name, text] of facts(data, block)) list.append(element("dt", name), element("dd", text));
  const marked = (text) => text.startsWith("On the") || block.notes.includes(text);
  const rest = sentences(data, block).map((text) => element("p", text, {className: marked(text) ? "critical" : ""}));
  return [title, list, ...rest];
}

/** Shows the tip beside a point of the window, without hiding that point. */
function tell(content, x, y) {
  const tip = by("tip");
  tip.replaceChildren(...content);
  tip.hidden = false;
  const {width, height} = tip.getBoundingClientRect();
  const beside = x + 16 + width > innerWidth ? x - 16 - width : x + 16;
  const below = y + 20 + height > innerHeight ? y - 20 - height : y + 20;
  const left = Math.min(Math.max(beside, 8), Math.max(innerWidth - width - 8, 8));
  Object.assign(tip.style, {left: `${left}px`, top: `${Math.max(below, 8)}px`});
}

/** Describes a block or an idle time. */
export function tellBlock(page, block, x, y) {
  tell(described(page, block), x, y);
}

export function tellText(text, x, y) {
  tell([element("div", text)], x, y);
}

export function tellNothing() {
  by("tip").hidden = true;
}

/** Has a text read aloud. */
export function say(text) {
  by("spoken").textContent = text;
}
