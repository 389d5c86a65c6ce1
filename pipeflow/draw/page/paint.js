/* Paint: one timeline on its two canvases, the axis and the lanes. Nothing here knows of pointers and keys. */

const AXIS = 24;
const FONT = 'system-ui, -apple-system, "Segoe UI", Roboto, "Liberation Sans", Arial, sans-serif';
const LARGEST = 16000; // pixels: what browsers allow a canvas to be high

/** Where the parts of a timeline lie, in CSS pixels of its lanes' canvas. */
function layOut(timeline, width) {
  const {lane, memory, gap} = timeline.heights;
  const left = 20 + 6.4 * `rank ${timeline.rows.length - 1}`.length;
  const right = 18 + 6.6 * Math.max(4, ...timeline.peaks.map((peak) => peak.length));
  const pitch = lane + memory + gap;
  const bar = Math.max(Math.ceil(lane / 5), 3);
  return {lane, bar, memory, pitch, left, width: Math.max(width - left - right, 40), right, height: timeline.rows.length * pitch + 2};
}

/** The colours of the scheme that is in force. */
function scheme() {
  const style = getComputedStyle(document.documentElement);
  const names = ["background", "lane", "grid", "text", "muted", "memory", "accent"];
  return Object.fromEntries(names.map((name) => [name, style.getPropertyValue(`--${name}`).trim()]));
}

/** A canvas's context, of as many pixels as the screen has, which counts in CSS pixels. */
function prepared(canvas, width, height, density) {
  const ratio = Math.min(density, LARGEST / height);
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  canvas.style.height = `${height}px`;
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  return context;
}

/** The smallest of 1, 2 and 5 times a power of ten that is at least `least`. */
function roundStep(least) {
  const power = 10 ** Math.floor(Math.log10(least));
  return [1, 2, 5, 10].map((digit) => digit * power).find((step) => step >= least * (1 - 1e-9));
}

/** The times that the axis names. */
function ticks(view, width) {
  const factor = written.factor;
  const step = roundStep(((view.last - view.first) * factor * 72) / width);
  const from = Math.ceil((view.first * factor) / step - 1e-9);
  const to = Math.floor((view.last * factor) / step + 1e-9);
  const digits = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
  return Array.from({length: Math.max(to - from + 1, 0)}, (_, index) => {
    const number = (from + index) * step;
    return {time: number / factor, text: digits > 15 ? number.toExponential(2) : number.toFixed(digits)};
  });
}

function paintAxis(context, place, view, colours) {
  context.font = `11px ${FONT}`;
  context.fillStyle = colours.muted;
  context.textAlign = "center";
  ticks(view, place.width).forEach(({time, text}, index) => {
    context.fillText(index === 0 && written.unit ? `${text} ${written.unit}` : text, place.x(time), 15);
    context.fillRect(Math.round(place.x(time)), 20, 1, 4);
  });
  context.textAlign = "right";
  context.fillText("peak", place.left + place.width + place.right - 2, 15);
}

function paintGround(context, timeline, place, view, colours) {
  context.fillStyle = colours.grid;
  for (const {time} of ticks(view, place.width)) context.fillRect(Math.round(place.x(time)), 0, 1, place.height - 2);
  context.font = `11px ${FONT}`;
  timeline.rows.forEach((_, rank) => {
    const y = rank * place.pitch;
    context.fillStyle = colours.lane;
    context.fillRect(place.left, y, place.width, place.lane);
    context.fillStyle = colours.text;
    context.textAlign = "right";
    context.fillText(`rank ${rank}`, place.left - 10, y + place.lane / 2 + 4);
    context.fillText(timeline.peaks[rank], place.left + place.width + place.right - 2, y + place.lane + place.memory);
  });
}

/** The indices of the blocks that the view shows: from the first, to the one after the last. */
function shown(row, view) {
  const first = Math.max(lastAt(row.length, (at) => row[at].start, view.first), 0);
  return [first, lastAt(row.length, (at) => row[at].start, view.last) + 1];
}

/** All lanes: those that are too dense for blocks as the mean colour of what runs in each column of pixels.
 * Whether there are any of these. */
function paintLanes(context, timeline, place, view, marks, colours) {
  const ratio = context.getTransform().a;
  let dense = false;
  context.save();
  context.beginPath();
  context.rect(place.left, -1, place.width, place.height + 2);
  context.clip();
  timeline.rows.forEach((row, rank) => {
    const [first, end] = shown(row, view);
    const columns = (end - first) * 2.5 > place.width * ratio;
    (columns ? paintColumns : paintBlocks)(context, row.slice(first, end), place, rank, marks, colours);
    dense ||= columns;
    paintReductions(context, timeline.reductions[rank], place, rank, marks, colours);
    paintMemory(context, timeline, place, view, rank, colours);
  });
  context.restore();
  return dense;
}

function paintBlocks(context, blocks, place, rank, marks, colours) {
  const ratio = context.getTransform().a;
  const snapped = (time) => Math.round(place.x(time) * ratio) / ratio;
  const y = rank * place.pitch;
  context.textAlign = "center";
  for (const block of blocks) {
    const first = snapped(block.start);
    const whole = snapped(block.end) - first;
    const joined = block.partner !== null && block.kind === "F";
    const width = Math.max(joined || whole < 3 ? whole : whole - 1, 1 / ratio);
    context.globalAlpha = marks.dims(block) ? 0.22 : 1;
    context.fillStyle = written.colours[block.kind][block.chunk];
    paintRect(context, first, y, width, place.lane);
    paintNumber(context, block, Math.max(first, place.left), Math.min(first + width, place.left + place.width), y, place);
    if (marks.path && block.critical) frame(context, first, y, width, place.lane, colours.accent);
  }
  context.globalAlpha = 1;
  for (const block of blocks) {
    if (block.partner === null || block.kind !== "F") continue;
    const first = snapped(block.start);
    context.globalAlpha = marks.dims(block) && marks.dims(block.partner) ? 0.3 : 1;
    frame(context, first, y, snapped(block.partner.end) - first - 1, place.lane, colours.text);
  }
  context.globalAlpha = 1;
}

/** Bars at the lower edge of a lane, with a thin gap above and beside them. */
function paintReductions(context, blocks, place, rank, marks, colours) {
  const y = rank * place.pitch + place.lane - place.bar;
  for (const block of blocks) {
    const [first, end] = [place.x(block.start), place.x(block.end)];
    if (end <= first) continue;
    context.fillStyle = colours.background;
    context.fillRect(first, y - 1, end - first, place.bar + 1);
    context.globalAlpha = marks.dims(block) ? 0.22 : 1;
    context.fillStyle = written.colours.R[block.chunk];
    context.fillRect(first, y, Math.max(end - first - 1, 1), place.bar);
    if (marks.path && block.critical) frame(context, first, y - 1, end - first, place.bar + 2, colours.accent);
    context.globalAlpha = 1;
  }
}

function frame(context, x, y, width, height, colour) {
  context.strokeStyle = colour;
  context.lineWidth = 1.5;
  context.beginPath();
  context.roundRect(x + 0.25, y + 0.25, Math.max(width - 0.5, 1), height - 0.5, 2.5);
  context.stroke();
}

/** With round corners where they can be seen: they take their time. */
function paintRect(context, x, y, width, height) {
  if (width <= 6) {
    context.fillRect(x, y, width, height);
    return;
  }
  context.beginPath();
  context.roundRect(x, y, width, height, 2);
  context.fill();
}

/** The microbatch, in the middle of what is seen of its block. */
function paintNumber(context, block, first, end, y, place) {
  const text = String(block.microbatch);
  const size = [11, 9, 8].find((size) => size < place.lane && text.length * size * 0.63 <= end - first - 1);
  if (size === undefined) return;
  context.font = `${size}px ${FONT}`;
  context.fillStyle = written.ink;
  context.fillText(text, (first + end) / 2, y + place.lane / 2 + size * 0.36);
}

const painted = new Map();

/** Red, green and blue of a colour, as the canvas reads it. */
function parts(colour) {
  if (!painted.has(colour)) {
    const context = Object.assign(document.createElement("canvas"), {width: 1, height: 1}).getContext("2d");
    context.fillStyle = colour;
    context.fillRect(0, 0, 1, 1);
    painted.set(colour, context.getImageData(0, 0, 1, 1).data);
  }
  return painted.get(colour);
}

function paintColumns(context, blocks, place, rank, marks, colours) {
  const ratio = context.getTransform().a;
  const width = Math.round(place.width * ratio);
  const sums = new Float32Array(4 * width); // red, green, blue and how much of the column is not idle
  for (const block of blocks) {
    const [red, green, blue] = parts(written.colours[block.kind][block.chunk]);
    const weight = marks.dims(block) ? 0.22 : 1;
    const start = Math.max((place.x(block.start) - place.left) * ratio, 0);
    const end = Math.min((place.x(block.end) - place.left) * ratio, width);
    for (let column = Math.floor(start); column < end; column++) {
      const part = weight * (Math.min(end, column + 1) - Math.max(start, column));
      sums[4 * column] += part * red;
      sums[4 * column + 1] += part * green;
      sums[4 * column + 2] += part * blue;
      sums[4 * column + 3] += part;
    }
  }
  const image = new ImageData(width, 1);
  const ground = parts(colours.lane);
  for (let at = 0; at < sums.length; at++) {
    const idle = 1 - Math.min(sums[at | 3], 1);
    image.data[at] = (at & 3) === 3 ? 255 : sums[at] + idle * ground[at & 3];
  }
  const strip = Object.assign(document.createElement("canvas"), {width, height: 1});
  strip.getContext("2d").putImageData(image, 0, 0);
  context.imageSmoothingEnabled = false;
  context.drawImage(strip, place.left, rank * place.pitch, place.width, place.lane);
}

/** What a rank keeps, as a hill; of steps closer than a pixel, the highest. */
function paintMemory(context, timeline, place, view, rank, colours) {
  const curve = timeline.curves[rank];
  const count = curve.length / 2;
  const floor = rank * place.pitch + place.lane + place.memory;
  const y = (amount) => floor - ((place.memory - 2) * amount) / (timeline.highest || 1);
  context.fillStyle = colours.grid;
  context.fillRect(place.left, floor, place.width, 1);
  const first = Math.max(lastAt(count, (at) => curve[2 * at], view.first), 0);
  const end = lastAt(count, (at) => curve[2 * at], view.last) + 1;
  if (first >= end) return;
  const steps = [];
  for (let at = first; at < end; at++) {
    const x = place.x(curve[2 * at]);
    const last = steps.at(-1);
    if (last && x - last.x < 1) last.top = Math.max(last.top, curve[2 * at + 1]);
    else steps.push({x, top: curve[2 * at + 1]});
  }
  const until = place.x(end === count ? curve[2 * count - 2] : view.last);
  context.beginPath();
  context.moveTo(steps[0].x, floor);
  steps.forEach(({x, top}, index) => {
    if (index) context.lineTo(x, y(steps[index - 1].top));
    context.lineTo(x, y(top));
  });
  context.lineTo(until, y(steps.at(-1).top));
  context.strokeStyle = context.fillStyle = colours.memory;
  context.lineWidth = 1;
  context.stroke();
  context.lineTo(until, floor);
  context.globalAlpha = 0.28;
  context.fill();
  context.globalAlpha = 1;
  paintPeak(context, curve, place, y);
}

/** A dot where a rank first keeps the most. */
function paintPeak(context, curve, place, y) {
  let peak = 0;
  for (let at = 0; at < curve.length; at += 2) if (curve[at + 1] > curve[peak + 1] * (1 + 1e-9)) peak = at;
  context.beginPath();
  context.arc(place.x(curve[peak]), y(curve[peak + 1]), place.memory > 10 ? 2.5 : 1.75, 0, 7);
  context.fill();
}

/** Lines from block to block: to another rank with an arrow's head, along a rank without. */
function paintLinks(context, links, place, colour, width) {
  context.save();
  context.beginPath();
  context.rect(place.left, 0, place.width, place.height);
  context.clip();
  context.strokeStyle = context.fillStyle = colour;
  context.lineWidth = width;
  for (const [from, to] of links) {
    if (from.rank === to.rank) continue;
    const down = to.rank > from.rank;
    const [x, end] = [place.x(from.end), place.x(to.start)];
    if (Math.max(x, end) < place.left - 9 || Math.min(x, end) > place.left + place.width + 9) continue;
    const y = from.rank * place.pitch + (down ? place.lane : 0);
    const tip = to.rank * place.pitch + (down ? 0 : place.lane);
    const head = place.lane < 13 ? 4 : 7;
    context.beginPath();
    context.moveTo(x, y);
    context.lineTo(end, tip);
    context.stroke();
    paintHead(context, end, tip, Math.atan2(tip - y, end - x), head);
  }
  context.restore();
}

function paintHead(context, x, y, angle, size) {
  context.beginPath();
  context.moveTo(x, y);
  for (const side of [-0.42, 0.42]) context.lineTo(x - size * Math.cos(angle + side), y - size * Math.sin(angle + side));
  context.fill();
}
