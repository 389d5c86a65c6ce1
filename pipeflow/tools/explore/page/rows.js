/* Rows: the rows of a schedule as lists of entries, and the edits of one. An entry is a text such as 2F0. A place
 * {rank, index} is an entry; as a gap, it is the gap before that entry. Must not contain: the page, and what is sound. */

export function parse(text) {
  return text.split("\n").map((line) => line.split(/[\s,]+/).filter(Boolean));
}

export function format(rows) {
  return rows.map((row) => row.join(" ")).join("\n");
}

function changed(rows, rank, change) {
  return rows.map((row, number) => (number === rank ? change(row) : row));
}

export function inserted(rows, {rank, index}, entry) {
  return changed(rows, rank, (row) => row.toSpliced(index, 0, entry));
}

export function removed(rows, {rank, index}) {
  return changed(rows, rank, (row) => row.toSpliced(index, 1));
}

/** Where an entry is after it was moved into a gap. */
export function landing(from, gap) {
  const behind = gap.rank === from.rank && gap.index > from.index;
  return {rank: gap.rank, index: gap.index - (behind ? 1 : 0)};
}

export function moved(rows, from, gap) {
  return inserted(removed(rows, from), landing(from, gap), rows[from.rank][from.index]);
}

/** The rows after an entry and the one behind it, a forward and a backward, were made a pair, or after a pair was split;
 * null if neither is possible. */
export function paired(rows, {rank, index}) {
  const [entry, next = ""] = rows[rank].slice(index, index + 2);
  const [, ...split] = /^\((.*);(.*)\)OVERLAP_F_B$/.exec(entry) ?? [];
  if (split.length) return changed(rows, rank, (row) => row.toSpliced(index, 1, ...split));
  const forward = [entry, next].find((each) => /^\d+F/.test(each));
  const backward = [entry, next].find((each) => /^\d+[BI]/.test(each));
  if (!forward || !backward) return null;
  return changed(rows, rank, (row) => row.toSpliced(index, 2, `(${forward};${backward})OVERLAP_F_B`));
}
