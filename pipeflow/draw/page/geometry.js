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

/** The index of the level of a curve at `time`: 0, which is nothing, before the first step. */
export function levelAt({times, levels}, time) {
  return levels[lastAt(times.length, (at) => times[at], time)] ?? 0;
}

/** The items that a view shows, of those that begin at `times`: the index of the first, and the one after the last. */
export function shown(times, view) {
  const timeOf = (at) => times[at];
  return [Math.max(lastAt(times.length, timeOf, view.first), 0), lastAt(times.length, timeOf, view.last) + 1];
}

/** The room for names and caps at the left and for measures at the right of the lanes: the same for all timelines of a
 * page, so that equal times stand below each other. */
export function margins(timelines) {
  const rows = timelines.flatMap((timeline) => timeline.rows);
  const longest = (texts) => Math.max(0, ...texts.map((text) => text.length));
  const name = Math.max(6.4 * longest(rows.flatMap((row) => row.names)), 5.4 * longest(rows.map((row) => row.cap?.text ?? "")));
  return {left: 20 + name, right: 18 + 6.6 * Math.max(4, longest(rows.flatMap((row) => [row.peak, row.used])))};
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
  place.level = ({rank}, amount) => rank * place.pitch + floor - ((memory - 2) * amount) / (timeline.highest || 1);
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

/** The steps of a curve that can be seen, as {x, amount}: of those closer than a pixel the highest, and of equal ones
 * in a row the first. */
export function outline({times, amounts}, place, first, end) {
  const steps = [];
  let [from, highest] = [-Infinity, -Infinity]; // of the pixel that is being read
  const add = () => { if (highest !== steps.at(-1)?.amount) steps.push({x: from, amount: highest}); };
  for (let at = first; at < end; at++) {
    const x = place.x(times[at]);
    if (x - from < 1) highest = Math.max(highest, amounts[at]);
    else {
      if (at > first) add();
      [from, highest] = [x, amounts[at]];
    }
  }
  if (first < end) add();
  return steps;
}
