/* Paint: one timeline on its two canvases, the axis and the lanes. Must not contain: what pointers and keys do. */

import {FONT, arrow, fillBlock, frame, mixed, within} from "./canvas.js";
import {shown, ticks} from "./geometry.js";
import {paintMemory, paintScale} from "./memory.js";
import {paintMoved} from "./moved.js";

const DIMMED = 0.22;
const SIZES = [11, 9, 8]; // pixels, of numbers

export function paintAxis(context, data, place, view, colours) {
  context.font = `11px ${FONT}`;
  context.fillStyle = colours.muted;
  context.textAlign = "center";
  ticks(view, place.width, data.factor).forEach(({time, text}, index) => {
    context.fillText(index === 0 && data.unit ? `${text} ${data.unit}` : text, place.x(time), 15);
    context.fillRect(Math.round(place.x(time)), 20, 1, 4);
  });
  context.textAlign = "right";
  ["busy", "peak"].forEach((text, line) => context.fillText(text, place.left + place.width + place.right - 2, 9 + 11 * line));
}

/** Empty lanes with their names and measures. */
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
    const right = place.left + place.width + place.right - 2;
    context.font = `${place.pitch < 26 ? 9 : 11}px ${FONT}`;
    context.fillStyle = colours.muted;
    context.fillText(row.used, right, y + place.lanes[0].height / 2 + (place.pitch < 26 ? 3 : 4));
    context.fillStyle = row.above ? colours.accent : colours.text;
    context.fillText(row.peak, right, y + place.floor);
    paintScale(context, timeline, row, place, colours);
  }
}

/** Paints all lanes: those too dense for blocks as the mean colour of each column of pixels. Returns whether there are
 * any of these. */
export function paintLanes(context, timeline, place, view, marks, palette, colours) {
  const ratio = context.getTransform().a;
  const strips = [];
  within(context, [place.left, -1, place.width, place.height + 2], () => {
    for (const row of timeline.rows) {
      for (const track of row.tracks) {
        const [first, end] = shown(track.starts, view);
        const dense = (end - first) * 2.5 > place.width * ratio;
        if (dense) strips.push({...track, first, end});
        else paintBlocks(context, track, [first, end], place, marks, palette, colours);
        if (marks.differences && !dense) paintMoved(context, {...track, first, end}, place, false, colours);
      }
      paintMemory(context, row, place, view, colours);
    }
    if (strips.length) paintStrips(context, strips, place, view, palette, colours);
    if (marks.differences) strips.forEach((strip) => paintMoved(context, strip, place, true, colours));
  });
  return strips.length > 0;
}

function paintStrips(context, strips, place, view, palette, colours) {
  const width = Math.round(place.width * context.getTransform().a);
  const scale = (place.width * context.getTransform().a) / (view.last - view.first);
  const image = mixed(strips, width, {origin: view.first, scale}, palette.colours, colours.lane, DIMMED);
  context.imageSmoothingEnabled = false;
  strips.forEach((strip, line) => {
    context.drawImage(image, 0, line, width, 1, place.left, place.y(strip), place.width, place.lanes[strip.lane].height);
  });
}

function paintBlocks(context, {blocks: all, shades, lane}, [first, end], place, marks, palette, colours) {
  const ratio = context.getTransform().a;
  const {height} = place.lanes[lane];
  const blocks = all.slice(first, end);
  const snapped = (time) => Math.round(place.x(time) * ratio) / ratio;
  const edges = blocks.map((block) => {
    const [from, to] = [snapped(block.start), snapped(block.end)];
    return [from, Math.max(isFirstHalf(block) || to - from < 3 ? to - from : to - from - 1, 1 / ratio)];
  });
  blocks.forEach((block, at) => {
    if (block.end <= block.start && lane) return;
    const [[from, width], y] = [edges[at], place.y(block)];
    context.globalAlpha = marks.dims(block) ? DIMMED : 1;
    context.fillStyle = palette.colours[shades[first + at]];
    fillBlock(context, from, y, width, height);
    if (marks.path && block.critical) frame(context, from, y, width, height, colours.accent);
  });
  if (!lane) paintNumbers(context, blocks, edges, place, marks, colours);
  for (const block of blocks.filter(isFirstHalf)) {
    const from = snapped(block.start);
    context.globalAlpha = marks.dims(block) && marks.dims(block.partner) ? 0.3 : 1;
    frame(context, from, place.y(block), snapped(block.partner.end) - from - 1, height, colours.text);
  }
  context.globalAlpha = 1;
}

function isFirstHalf(block) {
  return block.partner !== null && block.index < block.partner.index;
}

/** The microbatches, each in the middle of the visible part of its block. */
export function paintNumbers(context, blocks, edges, place, marks, colours) {
  const {height} = place.lanes[0];
  let font = 0;
  context.textAlign = "center";
  context.fillStyle = colours.ink;
  blocks.forEach((block, at) => {
    const [left, width] = edges[at];
    const [first, end] = [Math.max(left, place.left), Math.min(left + width, place.left + place.width)];
    const text = block.part;
    const size = SIZES.find((size) => size < height && text.length * size * 0.63 <= end - first - 1);
    if (size === undefined) return;
    if (size !== font) context.font = `${font = size}px ${FONT}`;
    context.globalAlpha = marks.dims(block) ? DIMMED : 1;
    context.fillText(text, (first + end) / 2, place.y(block) + height / 2 + size * 0.36);
  });
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
