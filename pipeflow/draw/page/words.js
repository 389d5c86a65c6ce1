/* Words: the texts about a block, about memory and about a microbatch. The sentences come from Python. */

import {levelAt} from "./geometry.js";

/** A sentence from Python, with values for the names in it. */
function filled(sentence, values) {
  return sentence.replace(/\{(\w+)\}/g, (_, name) => values[name]);
}

/** A time as a person reads it, to six digits. */
export function saidTime(data, time) {
  const number = Number((time * data.factor).toPrecision(6));
  return data.unit ? `${number} ${data.unit}` : String(number);
}

/** A range of time. */
export function saidRange(data, {first, last}) {
  return `${saidTime(data, first)} to ${saidTime(data, last)}`;
}

/** The facts about a block, as (name, text). */
export function facts(data, block) {
  return [
    ["stage", `${block.stage} (chunk ${block.chunk} of its rank)`],
    [block.kind.counts, block.part],
    ["rank", block.rank],
    ["start", saidTime(data, block.start)],
    ["end", saidTime(data, block.end)],
    ["duration", saidTime(data, block.end - block.start)],
    ["kept", saidLevel(block.row, block.start)],
  ];
}

/** What a rank keeps at a time, and how much that is above its cap. */
function saidLevel({curve, levels, cap}, time) {
  const level = levelAt(curve, time);
  const above = cap?.above[level];
  return above ? `${levels[level][1]}, ${above}` : levels[level][1];
}

/** Why a block did not begin earlier. */
function cause({sentences, contents}, {action, rank, after, value}) {
  if (after === null) return filled(sentences.at_once, {action, rank});
  if (value === null) return filled(sentences.after, {action, rank, other: after.action});
  const said = filled(sentences.value, {...value, content: contents[value.content]});
  const part = value.slice === undefined ? "" : `, slice ${value.slice}`;
  return filled(sentences.waited, {action, rank, value: said + part, source: after.rank});
}

/** How long its rank computed nothing before a block; 0 for blocks beside the computations. */
function idleBefore(block) {
  return block.lane ? 0 : Math.max(block.start - (block.before ? block.before.end : 0), 0);
}

/** Sentences about a block: its notes, what it waited for, its pair, the critical path. */
export function sentences(data, block) {
  const idle = idleBefore(block);
  const stood = idle > data.shortest * 1e-6 ? `; rank ${block.rank} was idle for ${saidTime(data, idle)}` : "";
  const found = [`${cause(data, block)}${stood}.`];
  if (block.partner) found.push(`Overlapped with ${block.partner.action}.`);
  if (block.critical) found.push("On the critical path.");
  return [...block.notes, ...found];
}

/** Why a rank is idle, and for how long. */
export function saidGap(data, {row, start, end, before, next}) {
  const {idle, done, empty} = data.sentences;
  const [time, first, last] = [end - start, start, end].map((each) => saidTime(data, each));
  const why = next ? cause(data, next) : filled(before ? done : empty, {rank: row.rank, action: before?.action});
  return `${filled(idle, {time, first, last})}: ${why}.`;
}

/** The facts and sentences as one text, to be read aloud. */
export function spoken(data, block) {
  if (block.gap) return `Rank ${block.rank}. ${saidGap(data, block)}`;
  const told = facts(data, block).map(([name, text]) => `${name} ${text}`);
  return [`${block.action}, ${block.kind.name}, ${told.join(", ")}.`, ...sentences(data, block)].join(" ");
}

/** What a rank keeps at a time, which is rounded to the precision of a pixel. */
export function saidMemory(data, row, time, view) {
  const step = 10 ** Math.floor(Math.log10((view.last - view.first) / 1000));
  return `rank ${row.rank} keeps ${saidLevel(row, time)} at ${saidTime(data, Math.round(time / step) * step)}`;
}

/** When a microbatch begins and ends in each timeline; `ways` has its blocks per timeline. */
export function saidWay(data, microbatch, ways) {
  const times = ways.filter((way) => way.length).map((way) => {
    return saidRange(data, {first: way[0].start, last: Math.max(...way.map((block) => block.end))});
  });
  return `microbatch ${microbatch}: ${times.join("; ")}`;
}
