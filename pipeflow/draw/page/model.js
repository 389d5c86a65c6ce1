/* Model: what was written into the page, as blocks that know each other. Nothing here draws. */

const written = JSON.parse(document.getElementById("data").textContent);

/** A time as a person reads it, to six digits. */
function said(time) {
  const number = Number((time * written.factor).toPrecision(6));
  return written.unit ? `${number} ${written.unit}` : String(number);
}

/** An amount of memory as a person reads it, in units of `timeline`. */
function saidAmount(timeline, amount) {
  if (timeline.memory !== "bytes") return `${Number(amount.toPrecision(4))} activations`;
  let prefix = 0;
  for (; amount >= 1000 && prefix < 4; prefix++) amount /= 1024;
  return `${Number(amount.toPrecision(prefix === 4 ? 4 : 3))} ${["", "Ki", "Mi", "Gi", "Ti"][prefix]}B`;
}

const ACTION = /^(\d+)([FBIWR])(\d+)$/;

function makeBlock(row, rank, index, action) {
  const [, stage, kind, microbatch] = ACTION.exec(action);
  return {
    action, rank, index, kind, stage: Number(stage), microbatch: Number(microbatch), chunk: row.chunks[stage],
    start: row.times[2 * index], end: row.times[2 * index + 1],
    before: null, after: null, value: null, partner: null, critical: false,
  };
}

/** One rank's blocks, in order; each knows the one `before` it. */
function makeRow(row, rank) {
  const blocks = row.actions ? row.actions.split(" ").map((action, index) => makeBlock(row, rank, index, action)) : [];
  blocks.forEach((block, index) => { block.after = block.before = blocks[index - 1] ?? null; });
  for (const index of row.pairs) {
    [blocks[index].partner, blocks[index + 1].partner] = [blocks[index + 1], blocks[index]];
  }
  return blocks;
}

/** One rank's reductions, numbered on from its blocks; they follow no microbatch, and none stands `before` them. */
function makeReductions({chunks, reductions}, rank, blocks) {
  if (!reductions || !reductions.actions) return [];
  const row = {chunks, times: reductions.times};
  return reductions.actions.split(" ").map((action, index) => {
    const {microbatch, ...block} = makeBlock(row, rank, index, action);
    return {...block, index: blocks.length + index, last: microbatch};
  });
}

/** The block or reduction of a rank with that index. */
function blockWith(timeline, rank, index) {
  const row = timeline.rows[rank];
  return row[index] ?? timeline.reductions[rank][index - row.length];
}

/** A timeline with its blocks; `after` is what a block began after, `value` what it waited for, if anything. */
function makeTimeline(timeline) {
  const rows = timeline.rows.map(makeRow);
  const reductions = timeline.rows.map((row, rank) => makeReductions(row, rank, rows[rank]));
  const at = (rank, index) => blockWith({rows, reductions}, rank, index);
  timeline.rows.forEach((row, rank) => {
    reductions[rank].forEach((block, index) => {
      const after = row.reductions.after[index];
      block.after = after && at(...after);
    });
    for (const [index, from, position, content, stage, microbatch] of [...row.waits, ...row.reductions?.waits ?? []]) {
      const block = at(rank, index);
      block.after = at(from, position);
      block.value = `${content} of stage ${stage}, microbatch ${microbatch}`;
    }
  });
  const path = timeline.path.map(([rank, index]) => at(rank, index));
  for (const block of path) block.critical = true;
  return {...timeline, rows, reductions, path, curves: timeline.rows.map((row) => row.memory), peaks: timeline.rows.map((row) => row.peak)};
}

/** Why a block did not begin earlier. */
function cause(block) {
  const it = `${block.action} on rank ${block.rank}`;
  if (block.after === null) return `${it} began at once`;
  if (block.value === null) return `${it} came after ${block.after.action}`;
  return `${it} waited for the ${block.value} from rank ${block.after.rank}`;
}

/** For how long its rank stood idle before a block; a reduction leaves its rank to others. */
function idleBefore(block) {
  if (block.kind === "R") return 0;
  return Math.max(block.start - (block.before ? block.before.end : 0), 0);
}

/** The index of the last of `items` whose time is at most `time`; -1 when there is none. */
function lastAt(count, timeOf, time) {
  let low = 0;
  let high = count;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (timeOf(middle) <= time) low = middle + 1;
    else high = middle;
  }
  return low - 1;
}

/** The block of a row that runs at `time`, give or take `slack`; null when the rank is idle. */
function blockAt(row, time, slack) {
  const index = lastAt(row.length, (at) => row[at].start, time);
  const near = [row[index], row[index + 1], row[index - 1]].filter(Boolean);
  return near.find((block) => block.start <= time && time < block.end)
    ?? near.find((block) => block.start - slack <= time && time <= block.end + slack) ?? null;
}

/** What a rank keeps at `time`. */
function keptAt(curve, time) {
  const index = lastAt(curve.length / 2, (at) => curve[2 * at], time);
  return index < 0 ? 0 : curve[2 * index + 1];
}

/** The blocks of a microbatch in a timeline, in the order of time. */
function wayOf(timeline, microbatch) {
  const way = timeline.rows.flatMap((row) => row.filter((block) => block.microbatch === microbatch));
  return way.sort((one, other) => one.start - other.start || one.end - other.end);
}
