/* Geometry: from times and ranks to places on a canvas, and back. Must not contain: the canvas itself. */

export const AXIS = 24; // pixels, the height of the axis
const SPACE = 1; // pixels between the lanes of a rank

/** The index of the last of `count` items whose time is at most `time`; -1 when there is none. */
export function lastAt(count, timeOf, time) {
  let low = 0;
  let high = count;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (timeOf(middle) <= time) low = middle + 1;
    else high = middle;
  }
  return low - 1;
}

/** The block of a lane that runs at `time`, give or take `slack`; null when there is none. */
export function blockAt(lane, time, slack) {
  const index = lastAt(lane.length, (at) => lane[at].start, time);
  const near = [lane[index], lane[index + 1], lane[index - 1]].filter(Boolean);
  return near.find((block) => block.start <= time && time < block.end)
    ?? near.find((block) => block.start - slack <= time && time <= block.end + slack) ?? null;
}

/** The block of a lane that runs when `block` starts, or else the last one before. */
export function nearest(lane, block) {
  return lane[Math.max(lastAt(lane.length, (at) => lane[at].start, block.start), 0)];
}

/** The step of a curve at `time`; undefined before the first one. */
export function stepAt(curve, time) {
  return curve[lastAt(curve.length, (at) => curve[at].time, time)];
}

/** The items that a view shows, of `count`: the index of the first, and the one after the last. */
export function shown(count, timeOf, view) {
  return [Math.max(lastAt(count, timeOf, view.first), 0), lastAt(count, timeOf, view.last) + 1];
}

/** The room for names at the left and for peaks at the right of the lanes: the same for all timelines of a page, so that
 * equal times stand below each other. */
export function margins(timelines) {
  const rows = timelines.flatMap((timeline) => timeline.rows);
  const longest = (texts) => Math.max(...texts.map((text) => text.length));
  const [name, peak] = [longest(rows.flatMap((row) => row.names)), longest(rows.map((row) => row.peak))];
  return {left: 20 + 6.4 * name, right: 18 + 6.6 * Math.max(4, peak)};
}

/** Where the parts of a timeline lie, in CSS pixels of its lanes' canvas. A rank has a lane for its computations, a
 * lower one for each other stream, and then one for its memory. */
export function layOut(timeline, view, width, {left, right}) {
  const {lane, beside, memory, gap} = timeline.heights;
  const others = Math.max(...timeline.rows.map((row) => row.lanes.length)) - 1;
  const lanes = [{top: 0, height: lane}];
  for (let other = 0; other < others; other++) lanes.push({top: lane + SPACE + other * (beside + SPACE), height: beside});
  const floor = lane + others * (beside + SPACE) + memory;
  const place = {lanes, memory, floor, pitch: floor + gap, left, right, width: Math.max(width - left - right, 40)};
  place.height = timeline.rows.length * place.pitch + 2;
  place.x = (time) => place.left + ((time - view.first) * place.width) / (view.last - view.first);
  place.time = (x) => view.first + ((x - place.left) * (view.last - view.first)) / place.width;
  place.y = (block) => block.rank * place.pitch + lanes[block.lane].top;
  return place;
}

/** The rank at `y` below the top of the lanes, and the index of its lane there, or null where its memory is. */
export function laneAt(place, y) {
  const rank = Math.floor(y / place.pitch);
  const below = y - rank * place.pitch;
  const lane = place.lanes.findIndex(({top, height}) => below < top + height + SPACE);
  return {rank, lane: lane < 0 ? null : lane};
}

/** The smallest of 1, 2 and 5 times a power of ten that is at least `least`. */
function roundStep(least) {
  const power = 10 ** Math.floor(Math.log10(least));
  return [1, 2, 5, 10].map((digit) => digit * power).find((step) => step >= least * (1 - 1e-9));
}

/** The times on an axis, each with its text: the time multiplied by `factor`. */
export function ticks(view, width, factor) {
  const step = roundStep(((view.last - view.first) * factor * 72) / width);
  const from = Math.ceil((view.first * factor) / step - 1e-9);
  const to = Math.floor((view.last * factor) / step + 1e-9);
  const digits = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
  return Array.from({length: Math.max(to - from + 1, 0)}, (_, index) => {
    const number = (from + index) * step;
    return {time: number / factor, text: digits > 15 ? number.toExponential(2) : number.toFixed(digits)};
  });
}

/** The highest of the steps of a curve that lie closer than a pixel, as {x, amount}. */
export function outline(curve, place, first, end) {
  const steps = [];
  for (const {time, amount} of curve.slice(first, end)) {
    const x = place.x(time);
    const last = steps.at(-1);
    if (last && x - last.x < 1) last.amount = Math.max(last.amount, amount);
    else steps.push({x, amount});
  }
  return steps;
}
