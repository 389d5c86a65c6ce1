/* Data: the data that Python wrote, as linked blocks. Must not contain: pixels, and texts for people. */

const LETTER = /\D/;

/** The data of a page, with its timelines as blocks. */
export function read(data) {
  return {...data, timelines: data.timelines.map((timeline) => readTimeline(timeline, data.kinds))};
}

/** A timeline with one row per rank; `path` has the blocks of its critical path. */
function readTimeline(timeline, kinds) {
  const rows = timeline.rows.map((row, rank) => readRow(row, rank, timeline, kinds));
  const at = (rank, index) => rows[rank].blocks[index];
  timeline.rows.forEach((row, rank) => {
    for (const [index, ...cause] of row.causes) Object.assign(at(rank, index), readCause(cause, at));
  });
  const path = timeline.path.map(([rank, index]) => at(rank, index));
  for (const block of path) block.critical = true;
  return {...timeline, rows, path};
}

/** A rank's blocks in the order of their starts, the same by lane, and what it keeps. A track has the numbers of a lane:
 * reading these is faster than reading blocks. */
function readRow(row, rank, {streams, levels}, kinds) {
  const read = {
    rank, levels, names: row.names, curve: readCurve(row.memory, levels), peak: row.peak, used: row.used, cap: row.cap,
  };
  const laneOf = Object.fromEntries(Object.entries(kinds).map(([letter, kind]) => [letter, streams.indexOf(kind.stream)]));
  read.above = row.cap !== null && read.curve.amounts[read.curve.peak] > row.cap.amount * (1 + 1e-9);
  const actions = row.actions ? row.actions.split(" ") : [];
  const blocks = read.blocks = actions.map((action, index) => makeBlock(row, read, index, action, kinds, laneOf));
  read.lanes = streams.map((_, lane) => (streams.length > 1 ? blocks.filter((block) => block.lane === lane) : blocks));
  for (const lane of read.lanes) lane.forEach((block, index) => { block.after = block.before = lane[index - 1] ?? null; });
  for (const [one, other] of row.pairs) [blocks[one].partner, blocks[other].partner] = [blocks[other], blocks[one]];
  read.tracks = read.lanes.map((lane, number) => ({
    rank, lane: number, blocks: lane, shades: new Uint16Array(lane.length), dims: null,
    starts: Float64Array.from(lane, (block) => block.start), ends: Float64Array.from(lane, (block) => block.end),
  }));
  return read;
}

/** What a rank keeps: times, the amount and the index of its level from each time on, and the first step at the peak. */
function readCurve(memory, levels) {
  const times = Float64Array.from(memory, ([time]) => time);
  const amounts = Float64Array.from(memory, ([, level]) => levels[level][0]);
  let peak = 0;
  amounts.forEach((amount, at) => { if (amount > amounts[peak] * (1 + 1e-9)) peak = at; });
  return {times, amounts, levels: Uint32Array.from(memory, ([, level]) => level), peak};
}

/** A block: an action in time. `before` is the block before it on its lane, `after` the one it began after, `value` what
 * it waited for, and `partner` the other block of its pair. `part` is the text of its microbatch and slice. `followed` is
 * its microbatch, if it belongs to a single one. `notes` are sentences that a feature adds. */
function makeBlock(written, row, index, action, kinds, laneOf) {
  const at = action.search(LETTER);
  const kind = kinds[action[at]];
  const [stage, part] = [Number(action.slice(0, at)), action.slice(at + 1)];
  const microbatch = parseInt(part, 10);
  return {
    action, kind, row, rank: row.rank, index, lane: laneOf[action[at]], stage, chunk: written.chunks[stage],
    part, microbatch, followed: kind.single ? microbatch : null,
    start: written.times[2 * index], end: written.times[2 * index + 1],
    before: null, after: null, value: null, partner: null, critical: false, moved: false, notes: [],
  };
}

/** The cause of a block that did not begin after the one before it: nothing, or a place, or a place and the value made
 * there. */
function readCause([rank, index, content, stage, microbatch, slice], at) {
  if (rank === undefined) return {after: null};
  return {after: at(rank, index), value: content === undefined ? null : {content, stage, microbatch, slice}};
}

/** The blocks of a microbatch in a timeline, in order of time. */
export function wayOf(timeline, microbatch) {
  const way = timeline.rows.flatMap(({blocks}) => blocks.filter((block) => block.followed === microbatch));
  return way.sort((one, other) => one.start - other.start || one.end - other.end);
}

/** The colours of blocks in a mode, and per kind where its own begin among them. */
export function paletteOf({kinds}, mode) {
  const colours = [];
  const firsts = new Map();
  for (const kind of Object.values(kinds)) firsts.set(kind, colours.push(...kind.colours[mode]) - kind.colours[mode].length);
  return {colours, firsts};
}

/** Which of the colours of its kind a block has. */
export function shadeOf({kind, chunk, microbatch}, mode) {
  return (mode === "microbatch" ? microbatch : chunk) % kind.colours[mode].length;
}

/** The idle times of a rank that are longer than `least`. Each has the block that ended `before` it and the one that is
 * `next`, or null; without a next one it lasts until the end of the step. */
export function gapsOf(row, makespan, least) {
  const gaps = [];
  let [before, start] = [null, 0];
  for (const next of [...row.lanes[0], null]) {
    const end = next ? next.start : makespan;
    if (end - start > least) {
      const index = (next ? next.index : row.blocks.length) - 0.5;
      gaps.push({gap: true, row, rank: row.rank, lane: 0, index, start, end, before, next, followed: null});
    }
    if (next) [before, start] = [next, Math.max(start, next.end)];
  }
  return gaps;
}
