/* Memory: what each rank keeps, as a filled curve below its lanes, and its cap. */

import {FONT, within} from "./canvas.js";
import {outline, shown} from "./geometry.js";

/** The curve of a rank; what is above its cap has another colour. */
export function paintMemory(context, row, place, view, colours) {
  const floor = place.level(row, 0);
  context.fillStyle = colours.grid;
  context.fillRect(place.left, floor, place.width, 1);
  const {curve, cap} = row;
  const [first, end] = shown(curve.times, view);
  if (first < end) paintCurve(context, row, place, outline(curve, place, first, end), {
    until: place.x(end === curve.times.length ? curve.times.at(-1) : view.last), floor, colours,
  });
  if (cap) paintCap(context, place, place.level(row, cap.amount), colours);
}

function paintCurve(context, row, place, steps, {until, floor, colours}) {
  const y = (amount) => place.level(row, amount);
  const line = new Path2D();
  line.moveTo(steps[0].x, floor);
  steps.forEach(({x, amount}, index) => {
    if (index) line.lineTo(x, y(steps[index - 1].amount));
    line.lineTo(x, y(amount));
  });
  line.lineTo(until, y(steps.at(-1).amount));
  context.strokeStyle = context.fillStyle = colours.memory;
  context.lineWidth = 1;
  context.stroke(line);
  line.lineTo(until, floor);
  context.globalAlpha = 0.28;
  context.fill(line);
  context.globalAlpha = 1;
  const {times, amounts, peak} = row.curve;
  if (row.above) {
    const top = y(amounts[peak]) - 1;
    context.fillStyle = colours.accent;
    within(context, [place.left, top, place.width, y(row.cap.amount) - top], () => context.fill(line));
  }
  context.beginPath(); // a dot where the rank first reaches its peak
  context.arc(place.x(times[peak]), y(amounts[peak]), place.memory > 10 ? 2.5 : 1.75, 0, 7);
  context.fill();
}

function paintCap(context, place, y, colours) {
  context.strokeStyle = colours.accent;
  context.lineWidth = 1;
  context.setLineDash([5, 3]);
  context.beginPath();
  context.moveTo(place.left, Math.round(y) + 0.5);
  context.lineTo(place.left + place.width, Math.round(y) + 0.5);
  context.stroke();
  context.setLineDash([]);
}

/** The axis of a rank's memory, if it has a cap: nothing, the cap, and the highest amount of the timeline if that is
 * higher, as far as there is room. */
export function paintScale(context, timeline, row, place, colours) {
  if (!row.cap || place.memory < 12) return;
  const {accent, muted} = colours;
  const marks = [[row.cap.amount, row.cap.text, accent], [0, "0", muted], [timeline.highest, timeline.scale, muted]];
  const taken = [];
  context.font = `${place.memory < 18 ? 8 : 9}px ${FONT}`;
  for (const [amount, text, colour] of marks) {
    const y = place.level(row, amount);
    if (taken.some((other) => Math.abs(other - y) < 9)) continue;
    taken.push(y);
    context.fillStyle = colour;
    context.fillText(text, place.left - 10, y + 3);
    context.fillRect(place.left - 6, Math.round(y), 5, 1);
  }
}
