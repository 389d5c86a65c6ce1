/* Find: the blocks that a text describes, such as 2F0, F0, stage 2 or rank 1 B. */

const PART = /\s*(?:(rank|stage|chunk|microbatch) *(\d+)|(\d*)([a-z])(\d*(?:\.\d+)?))(?:[\s,]+|$)/iy;

/** Tests for blocks, all of which must hold; null if the text has not the form. */
function tests(text, kinds) {
  const found = [];
  PART.lastIndex = 0;
  while (PART.lastIndex < text.length) {
    const match = PART.exec(text);
    const [, word, number, stage, letter, part] = match ?? [];
    const kind = letter && kinds[letter.toUpperCase()];
    if (!word && !kind) return null;
    if (word) found.push((block) => block[word.toLowerCase()] === Number(number));
    else {
      found.push((block) => block.kind === kind && (!stage || block.stage === Number(stage))
        && (!part || (part.includes(".") ? block.part === part : block.microbatch === Number(part))));
    }
  }
  return found;
}

/** The blocks of timelines that a text describes, timeline by timeline in order of time, as {number, block}; null if the
 * text has not the form. */
export function findBlocks(text, {kinds, timelines}) {
  const all = tests(text, kinds);
  if (!all) return null;
  return timelines.flatMap((timeline, number) => {
    const blocks = timeline.rows.flatMap((row) => row.blocks.filter((block) => all.every((test) => test(block))));
    return blocks.sort((one, other) => one.start - other.start).map((block) => ({number, block}));
  });
}
