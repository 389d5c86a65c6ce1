/* Tell: what there is to say of a block, and the tip that says it. */

function element(name, text, more = {}) {
  return Object.assign(document.createElement(name), {textContent: text}, more);
}

/** What there is to know of a block, as (name, text). */
function facts(block) {
  return [
    ["stage", `${block.stage} (chunk ${block.chunk} of its rank)`],
    block.kind === "R" ? ["last microbatch", block.last] : ["microbatch", block.microbatch],
    ["rank", block.rank],
    ["start", said(block.start)],
    ["end", said(block.end)],
    ["duration", said(block.end - block.start)],
  ];
}

/** What a block waited for, and what else there is to say, as sentences. */
function sentences(block) {
  const idle = idleBefore(block);
  const found = [`${cause(block)}${idle > written.shortest * 1e-6 ? `; rank ${block.rank} stood idle for ${said(idle)}` : ""}.`];
  if (block.partner) found.push(`Overlapped with ${block.partner.action}.`);
  if (block.critical) found.push("On the critical path.");
  return found;
}

function describe(block) {
  const title = element("h3", "");
  const swatch = document.createElement("i");
  swatch.style.background = written.colours[block.kind][block.chunk];
  title.append(swatch, block.action, element("span", written.kinds[block.kind]));
  const list = document.createElement("dl");
  for (const [name, text] of facts(block)) list.append(element("dt", name), element("dd", text));
  const rest = sentences(block).map((text) => element("p", text, {className: text.startsWith("On the") ? "critical" : ""}));
  return [title, list, ...rest];
}

/** Shows the tip beside a point of the window, where it does not hide it. */
function tell(content, x, y) {
  const tip = by("tip");
  tip.replaceChildren(...content);
  tip.hidden = false;
  const {width, height} = tip.getBoundingClientRect();
  const left = x + 16 + width > innerWidth ? x - 16 - width : x + 16;
  const top = y + 20 + height > innerHeight ? y - 20 - height : y + 20;
  Object.assign(tip.style, {left: `${Math.min(Math.max(left, 8), Math.max(innerWidth - width - 8, 8))}px`, top: `${Math.max(top, 8)}px`});
}

function describeMemory(timeline, rank, time) {
  const [kept, step] = [keptAt(timeline.curves[rank], time), 10 ** Math.floor(Math.log10((view.last - view.first) / 1000))];
  const when = said(Math.round(time / step) * step);
  return [element("div", `rank ${rank} keeps ${saidAmount(timeline, kept)} at ${when}`)];
}
