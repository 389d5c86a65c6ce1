/* Model: what a step of the chosen model takes, below the timelines, and whether it fits. */

import {tellMisfits} from "./fit.js";
import {by} from "./page.js";

const NONE = {tables: "", misfits: []};

export function showModel({link, server, page, shown}) {
  const place = by("views").appendChild(Object.assign(document.createElement("div"), {id: "modelled"}));
  const show = ({tables, misfits}) => {
    place.innerHTML = tables;
    tellMisfits(page, "device", misfits);
  };
  shown.listen(() => {
    if (link.get("model")) server.follow("model", link.fields, show, () => show(NONE));
    else show(NONE);
  });
}
