/* Fit: what does not fit into memory, in red: in a sentence below the heading of its timeline, at the names of its ranks,
 * and above their caps. The sentences come from Python. */

import {FONT} from "./canvas.js";
import {make} from "./controls.js";
import {outline, shown} from "./geometry.js";

/** The colour of what is wrong. */
export const fault = () => getComputedStyle(document.documentElement).getPropertyValue("--fault").trim();

/** Says which ranks of each timeline are above the limit `kind`: `misfits` has {ranks, said} or null for each. */
export function tellMisfits(page, kind, misfits) {
  page.charts.forEach((chart, number) => {
    const misfit = misfits[number];
    const id = `misfit-${kind}-${number}`;
    document.getElementById(id)?.remove();
    chart.misfits = {...chart.misfits, [kind]: misfit?.ranks ?? []};
    if (misfit) chart.element.before(make("p", {id, className: "misfit", textContent: misfit.said}));
    const said = [...chart.element.parentElement.querySelectorAll(".misfit")].map((each) => each.id);
    chart.lanes.setAttribute("aria-describedby", [...said, "keys"].join(" "));
  });
  page.repaint();
}

/** Writes a text again in the colour of the context, right aligned. */
function rewrite(context, text, [x, y], font, background) {
  const colour = context.fillStyle;
  context.font = font;
  context.textAlign = "right";
  context.fillStyle = background;
  const {width} = context.measureText(text);
  context.fillRect(x - width - 3, y - 9, width + 4, 11);
  context.fillStyle = colour;
  context.fillText(text, x, y);
}

/** Paints what a row keeps above its cap, and its peak. */
function paintAbove(context, {place}, row, view, {background}) {
  const {curve, cap, rank} = row;
  const [first, end] = shown(curve.times, view);
  const [top, right] = [place.level(row, cap.amount), place.left + place.width];
  outline(curve, place, first, end).forEach(({x, amount}, at, steps) => {
    if (amount <= cap.amount * (1 + 1e-9)) return;
    const [from, to] = [x, steps[at + 1]?.x ?? right].map((each) => Math.min(Math.max(each, place.left), right));
    context.fillRect(from, place.level(row, amount), to - from, top - place.level(row, amount));
  });
  const at = [right + place.right - 2, rank * place.pitch + place.floor];
  rewrite(context, row.peak, at, `${place.pitch < 26 ? 9 : 11}px ${FONT}`, background);
}

export function showFit({page, shown: answers}) {
  answers.listen(({misfits}) => tellMisfits(page, "cap", misfits));
  page.painters.push((context, chart, colours) => {
    const {place, timeline, misfits = {}} = chart;
    context.fillStyle = fault();
    for (const rank of new Set(Object.values(misfits).flat())) {
      const {height} = place.lanes[0];
      const y = rank * place.pitch;
      const name = timeline.rows[rank].names[0];
      rewrite(context, name, [place.left - 10, y + height / 2 + 4], `bold 11px ${FONT}`, colours.background);
      context.fillRect(place.left - 7, y, 4, height);
    }
    for (const row of timeline.rows) if (row.above) paintAbove(context, chart, row, page.view, colours);
  });
}
