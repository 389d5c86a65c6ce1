/* Canvas: general drawing: canvases as sharp as the screen, frames, arrows, mixed colours. */

const LARGEST = 16000; // pixels: the largest height of a canvas in browsers
export const FONT = 'system-ui, -apple-system, "Segoe UI", Roboto, "Liberation Sans", Arial, sans-serif';

/** The colours of the current scheme. */
export function scheme() {
  const style = getComputedStyle(document.documentElement);
  const names = ["background", "lane", "grid", "text", "muted", "memory", "accent", "ink", "glow"];
  return Object.fromEntries(names.map((name) => [name, style.getPropertyValue(`--${name}`).trim()]));
}

/** A canvas's context with the resolution of the screen, and with CSS pixels as its unit. */
export function prepared(canvas, width, height, density) {
  const ratio = Math.min(density, LARGEST / height);
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  canvas.style.height = `${height}px`;
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  return context;
}

/** Calls `draw`, and clips what it draws to a rectangle. */
export function within(context, [x, y, width, height], draw) {
  context.save();
  context.beginPath();
  context.rect(x, y, width, height);
  context.clip();
  draw();
  context.restore();
}

export function frame(context, x, y, width, height, colour) {
  context.strokeStyle = colour;
  context.lineWidth = 1.5;
  context.beginPath();
  context.roundRect(x + 0.25, y + 0.25, Math.max(width - 0.5, 1), height - 0.5, 2.5);
  context.stroke();
}

/** Rounds the corners only where that is visible, since it is slow. */
export function fillBlock(context, x, y, width, height) {
  if (width <= 6) {
    context.fillRect(x, y, width, height);
    return;
  }
  context.beginPath();
  context.roundRect(x, y, width, height, 2);
  context.fill();
}

/** A line with a head at its end. */
export function arrow(context, [x, y], [end, tip], size) {
  context.beginPath();
  context.moveTo(x, y);
  context.lineTo(end, tip);
  context.stroke();
  const angle = Math.atan2(tip - y, end - x);
  context.beginPath();
  context.moveTo(end, tip);
  for (const side of [-0.42, 0.42]) {
    context.lineTo(end - size * Math.cos(angle + side), tip - size * Math.sin(angle + side));
  }
  context.fill();
}

const known = new Map();

/** Red, green and blue of a colour, as the canvas reads it. */
function parts(colour) {
  if (!known.has(colour)) {
    const context = Object.assign(document.createElement("canvas"), {width: 1, height: 1}).getContext("2d");
    context.fillStyle = colour;
    context.fillRect(0, 0, 1, 1);
    known.set(colour, context.getImageData(0, 0, 1, 1).data);
  }
  return known.get(colour);
}

/** An image with one line of pixels for each of `strips`: {starts, ends, shades, dims, first, end}, the pieces from
 * `first` to before `end` with their colours among `colours`, mixed on a ground. A time `origin` is at its left edge, and
 * a unit of time is `scale` columns; a piece that dims counts for `dimmed` of its colour. */
export function mixed(strips, width, {origin, scale}, colours, ground, dimmed) {
  const sums = new Float32Array(4 * width); // red, green, blue and the busy share of the column
  const image = new ImageData(width, strips.length);
  const idleColour = parts(ground);
  const rgb = colours.map(parts);
  strips.forEach(({starts, ends, shades, dims, first, end}, line) => {
    sums.fill(0);
    for (let at = first; at < end; at++) {
      const [from, to] = [Math.max((starts[at] - origin) * scale, 0), Math.min((ends[at] - origin) * scale, width)];
      const colour = rgb[shades[at]];
      const weight = dims !== null && dims[at] ? dimmed : 1;
      for (let column = Math.floor(from); column < to; column++) {
        const part = weight * (Math.min(to, column + 1) - Math.max(from, column));
        sums[4 * column] += part * colour[0];
        sums[4 * column + 1] += part * colour[1];
        sums[4 * column + 2] += part * colour[2];
        sums[4 * column + 3] += part;
      }
    }
    const offset = 4 * width * line;
    for (let at = 0; at < sums.length; at += 4) {
      const idle = 1 - Math.min(sums[at + 3], 1);
      for (let part = 0; part < 3; part++) image.data[offset + at + part] = sums[at + part] + idle * idleColour[part];
      image.data[offset + at + 3] = 255;
    }
  });
  const canvas = Object.assign(document.createElement("canvas"), {width, height: strips.length});
  canvas.getContext("2d").putImageData(image, 0, 0);
  return canvas;
}
