/* Paint: one timeline on its two canvases, the axis and the lanes. Must not contain: what pointers and keys do. */

import {FONT, arrow, fillBlock, frame, mixed, within} from "./canvas.js";
import {outline, shown, ticks} from "./geometry.js";

const DIMMED = 0.22;

export function paintAxis(context, data, place, view, colours) {
  context.font = `11px ${FONT}`;
  context.fillStyle = colours.muted;
  context.textAlign = "center";
  ticks(view, place.width, data.factor).forEach(({time, text}, index) => {
    context.fillText(index === 0 && data.unit ? `${text} ${data.unit}` : text, place.x(time), 15);
    context.fillRect(Math.round(place.x(time)), 20, 1, 4);
  });
  context.textAlign = "right";
  context.fillText("peak", place.left + place.width + place.right - 2, 15);
}

/** Empty lanes with their names and peaks. */
export function paintGround(context, data, timeline, place, view, colours) {
  context.fillStyle = colours.grid;
  for (const {time} of ticks(view, place.width, data.factor)) {
    context.fillRect(Math.round(place.x(time)), 0, 1, place.height - 2);
  }
  context.textAlign = "right";
  for (const row of timeline.rows) {
    const y = row.rank * place.pitch;
    place.lanes.forEach(({top, height}, lane) => {
      context.fillStyle = colours.lane;
      context.fillRect(place.left, y + top, place.width, height);
      context.fillStyle = lane ? colours.muted : colours.text;
      context.font = `${lane ? Math.min(height, 10) : 11}px ${FONT}`;
      context.fillText(row.names[lane], place.left - 10, y + top + height / 2 + (lane ? 3 : 4));
    });
    context.fillStyle = colours.text;
    context.font = `11px ${FONT}`;
    context.fillText(row.peak, place.left + place.width + place.right - 2, y + place.floor);
  }
}

/** Paints all lanes: those too dense for blocks as the mean colour of each column of pixels. Returns whether there are
 * any of these. */
export function paintLanes(context, timeline, place, view, marks, colours) {
  const ratio = context.getTransform().a;
  let dense = false;
  within(context, [place.left, -1, place.width, place.height + 2], () => {
    for (const row of timeline.rows) {
      row.lanes.forEach((lane, number) => {
        const [first, end] = shown(lane.length, (at) => lane[at].start, view);
        const columns = (end - first) * 2.5 > place.width * ratio;
        (columns ? paintColumns : paintBlocks)(context, lane.slice(first, end), place, place.lanes[number], marks, colours);
        dense ||= columns;
      });
      paintMemory(context, timeline, row, place, view, colours);
    }
  });
  return dense;
}

function paintBlocks(context, blocks, place, {height}, marks, colours) {
  const ratio = context.getTransform().a;
  const snapped = (time) => Math.round(place.x(time) * ratio) / ratio;
  context.textAlign = "center";
  for (const block of blocks) {
    if (block.end <= block.start && block.lane) continue;
    const [first, y] = [snapped(block.start), place.y(block)];
    const whole = snapped(block.end) - first;
    const joined = isFirstHalf(block);
    const width = Math.max(joined || whole < 3 ? whole : whole - 1, 1 / ratio);
    context.globalAlpha = marks.dims(block) ? DIMMED : 1;
    context.fillStyle = block.kind.colours[block.chunk];
    fillBlock(context, first, y, width, height);
    if (!block.lane) paintNumber(context, block, first, width, place, colours);
    if (marks.path && block.critical) frame(context, first, y, width, height, colours.accent);
  }
  context.globalAlpha = 1;
  for (const block of blocks.filter(isFirstHalf)) {
    const first = snapped(block.start);
    context.globalAlpha = marks.dims(block) && marks.dims(block.partner) ? 0.3 : 1;
    frame(context, first, place.y(block), snapped(block.partner.end) - first - 1, height, colours.text);
  }
  context.globalAlpha = 1;
}

function isFirstHalf(block) {
  return block.partner !== null && block.index < block.partner.index;
}

/** The microbatch, in the middle of the visible part of its block. */
function paintNumber(context, block, left, width, place, colours) {
  const [first, end] = [Math.max(left, place.left), Math.min(left + width, place.left + place.width)];
  const text = String(block.microbatch);
  const {height} = place.lanes[block.lane];
  const size = [11, 9, 8].find((size) => size < height && text.length * size * 0.63 <= end - first - 1);
  if (size === undefined) return;
  context.font = `${size}px ${FONT}`;
  context.fillStyle = colours.ink;
  context.fillText(text, (first + end) / 2, place.y(block) + height / 2 + size * 0.36);
}

function paintColumns(context, blocks, place, {height}, marks, colours) {
  const ratio = context.getTransform().a;
  const column = (time) => (place.x(time) - place.left) * ratio;
  const pieces = blocks.map((block) => ({
    start: column(block.start), end: column(block.end),
    colour: block.kind.colours[block.chunk], weight: marks.dims(block) ? DIMMED : 1,
  }));
  const strip = mixed(pieces, Math.round(place.width * ratio), colours.lane);
  context.imageSmoothingEnabled = false;
  context.drawImage(strip, place.left, place.y(blocks[0]), place.width, height);
}

/** The memory that a rank keeps, as a filled curve; of steps closer than a pixel, the highest. */
function paintMemory(context, timeline, {rank, curve}, place, view, colours) {
  const floor = rank * place.pitch + place.floor;
  const y = (amount) => floor - ((place.memory - 2) * amount) / (timeline.highest || 1);
  context.fillStyle = colours.grid;
  context.fillRect(place.left, floor, place.width, 1);
  const [first, end] = shown(curve.length, (at) => curve[at].time, view);
  if (first >= end) return;
  const steps = outline(curve, place, first, end);
  const until = place.x(end === curve.length ? curve.at(-1).time : view.last);
  context.beginPath();
  context.moveTo(steps[0].x, floor);
  steps.forEach(({x, amount}, index) => {
    if (index) context.lineTo(x, y(steps[index - 1].amount));
    context.lineTo(x, y(amount));
  });
  context.lineTo(until, y(steps.at(-1).amount));
  context.strokeStyle = context.fillStyle = colours.memory;
  context.lineWidth = 1;
  context.stroke();
  context.lineTo(until, floor);
  context.globalAlpha = 0.28;
  context.fill();
  context.globalAlpha = 1;
  paintPeak(context, curve, place, y);
}

/** A dot where a rank first reaches its peak. */
function paintPeak(context, curve, place, y) {
  const peak = curve.reduce((most, step) => (step.amount > most.amount * (1 + 1e-9) ? step : most));
  context.beginPath();
  context.arc(place.x(peak.time), y(peak.amount), place.memory > 10 ? 2.5 : 1.75, 0, 7);
  context.fill();
}

/** Arrows between blocks on different ranks. */
export function paintLinks(context, links, place, colour, width) {
  const size = place.lanes[0].height < 13 ? 4 : 7;
  within(context, [place.left, 0, place.width, place.height], () => {
    context.strokeStyle = context.fillStyle = colour;
    context.lineWidth = width;
    for (const [from, to] of links) {
      const [x, end] = [place.x(from.end), place.x(to.start)];
      const hidden = Math.max(x, end) < place.left - 9 || Math.min(x, end) > place.left + place.width + 9;
      if (from.rank === to.rank || hidden) continue;
      const down = to.rank > from.rank;
      const y = place.y(from) + (down ? place.lanes[from.lane].height : 0);
      const tip = place.y(to) + (down ? 0 : place.lanes[to.lane].height);
      arrow(context, [x, y], [end, tip], size);
    }
  });
}
