/* Minimap: the whole of a wide timeline in a strip above the lanes, with a window that shows and moves the part in view. */

import {mixed} from "./canvas.js";

const WIDE = 150; // blocks of a rank
const PART = 8; // a click on a map whose window is whole shows this part

export function makeMinimap(page) {
  const [map, canvas, glass] = ["div", "canvas", "div"].map((name) => document.createElement(name));
  const title = "The whole step: click or drag to show a part of it";
  Object.assign(map, {id: "map", hidden: true, ariaHidden: "true", title}); // the arrow keys move the lanes
  map.append(canvas, glass);
  document.querySelector(".legend").after(map);
  let painted = []; // what the picture was made of

  const paint = (colours) => {
    const [{timeline, place}] = page.charts;
    const width = Math.round(place.width);
    const made = [timeline, page.palette, width, colours.lane];
    if (made.every((each, at) => each === painted[at])) return;
    painted = made;
    const strips = timeline.rows.map(({tracks: [track]}) => ({...track, first: 0, end: track.blocks.length}));
    const image = mixed(strips, width, {origin: 0, scale: width / page.horizon}, page.palette.colours, colours.lane, 1);
    Object.assign(canvas, {width, height: 40}).getContext("2d").drawImage(image, 0, 0, width, 40);
    Object.assign(map.style, {marginLeft: `${place.left}px`, width: `${width}px`});
  };
  page.painters.push((context, chart, colours) => {
    if (chart !== page.charts[0]) return;
    map.hidden = !chart.timeline.rows.some(({blocks}) => blocks.length > WIDE);
    if (map.hidden) return;
    paint(colours);
    const [left, width] = [page.view.first, page.length].map((time) => `${(100 * time) / page.horizon}%`);
    Object.assign(glass.style, {left, width});
  });

  const move = (event) => {
    const {left, width} = map.getBoundingClientRect();
    const length = page.length < page.horizon ? page.length : page.horizon / PART;
    page.show(((event.clientX - left) * page.horizon) / width - length / 2, length);
  };
  map.addEventListener("pointerdown", (event) => { map.setPointerCapture(event.pointerId); move(event); });
  map.addEventListener("pointermove", (event) => { if (event.buttons) move(event); });
}
