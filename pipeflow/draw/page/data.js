/* Data: the data that Python wrote, as linked blocks. Must not contain: pixels, and texts for people. */

const ACTION = /^(\d+)(\D+)(\d+)$/;

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

/** A rank's blocks in the order of their starts, the same by lane, and its memory curve. */
function readRow(row, rank, {streams, levels}, kinds) {
  const actions = row.actions ? row.actions.split(" ") : [];
  const blocks = actions.map((action, index) => makeBlock(row, rank, index, action, streams, kinds));
  const lanes = streams.map((_, lane) => blocks.filter((block) => block.lane === lane));
  for (const lane of lanes) lane.forEach((block, index) => { block.after = block.before = lane[index - 1] ?? null; });
  for (const [one, other] of row.pairs) [blocks[one].partner, blocks[other].partner] = [blocks[other], blocks[one]];
  const curve = row.memory.map(([time, level]) => ({time, amount: levels[level][0], text: levels[level][1]}));
  return {rank, blocks, lanes, names: row.names, curve, peak: row.peak};
}

/** A block: an action in time. `before` is the block before it on its lane, `after` the one it began after, `value` what
 * it waited for, and `partner` the other block of its pair. `followed` is its microbatch, if it belongs to a single one. */
function makeBlock(row, rank, index, action, streams, kinds) {
  const [, stage, letter, microbatch] = ACTION.exec(action);
  const kind = kinds[letter];
  return {
    action, kind, rank, index, lane: streams.indexOf(kind.stream), stage: Number(stage), chunk: row.chunks[stage],
    microbatch: Number(microbatch), followed: kind.single ? Number(microbatch) : null,
    start: row.times[2 * index], end: row.times[2 * index + 1],
    before: null, after: null, value: null, partner: null, critical: false,
  };
}

/** The cause of a block that did not begin after the one before it: nothing, or a place, or a place and the value made
 * there. */
function readCause([rank, index, content, stage, microbatch], at) {
  if (rank === undefined) return {after: null};
  return {after: at(rank, index), value: content === undefined ? null : {content, stage, microbatch}};
}

/** The blocks of a microbatch in a timeline, in order of time. */
export function wayOf(timeline, microbatch) {
  const way = timeline.rows.flatMap(({blocks}) => blocks.filter((block) => block.followed === microbatch));
  return way.sort((one, other) => one.start - other.start || one.end - other.end);
}
