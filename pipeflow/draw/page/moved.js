/* Moved: marks blocks that stand at another place of their row than in the first timeline. */

import {within} from "./canvas.js";

const STEP = 5; // pixels between the lines of the hatch
const BAR = 3; // pixels, the height of the bar where blocks are too small for a hatch

/** Marks the moved ones among the visible blocks of a track: with a hatch, or where `dense` with a bar at the foot of its
 * lane. */
export function paintMoved(context, track, place, dense, colours) {
  const blocks = track.blocks.slice(track.first, track.end).filter((block) => block.moved);
  const bars = joined(blocks, place, dense ? 1 : 0);
  const y = place.y(track);
  const {height} = place.lanes[track.lane];
  [context.fillStyle, context.strokeStyle] = [colours.text, colours.ink];
  for (const [start, end] of bars) {
    if (dense || end - start < 3) context.fillRect(start, y + height - BAR, Math.max(end - start, 1), BAR);
    else within(context, [start, y, end - start - 1, height], () => hatch(context, start, y, end, height));
  }
}

/** The visible parts of blocks as [start, end] in pixels; those at most `gap` apart are one. */
function joined(blocks, place, gap) {
  const bars = [];
  for (const block of blocks) {
    const start = Math.max(place.x(block.start), place.left);
    const end = Math.min(place.x(block.end), place.left + place.width);
    if (gap && bars.length && start - bars.at(-1)[1] <= gap) bars.at(-1)[1] = Math.max(end, bars.at(-1)[1]);
    else if (end > start) bars.push([start, end]);
  }
  return bars;
}

function hatch(context, start, y, end, height) {
  context.globalAlpha = 0.5;
  context.lineWidth = 1;
  context.beginPath();
  for (let x = start - height - ((start - height) % STEP); x < end; x += STEP) {
    context.moveTo(x, y + height);
    context.lineTo(x + height, y);
  }
  context.stroke();
  context.globalAlpha = 1;
}
