/* Model: what a step of the chosen model takes, below the timelines. */

import {by} from "./page.js";

export function showModel({link, server, shown}) {
  const place = by("views").appendChild(Object.assign(document.createElement("div"), {id: "modelled"}));
  const show = ({tables}) => { place.innerHTML = tables; };
  shown.listen(() => {
    if (link.get("model")) server.follow("model", link.fields, show, () => show({tables: ""}));
    else show({tables: ""});
  });
}
