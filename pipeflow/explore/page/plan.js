/* Plan: shows the timelines of the schedules that the link names. */

import {read} from "./data.js";
import {by} from "./page.js";

export function showPlan({link, server, page}) {
  const refuse = (message) => {
    by("problem").textContent = message;
    by("problem").hidden = false;
    by("shown").classList.add("stale");
  };
  const show = (answer) => {
    by("problem").hidden = true;
    by("shown").classList.remove("stale");
    for (const part of ["legend", "charts", "tables"]) by(part).innerHTML = answer[part];
    document.title = `${answer.schedules.join(", ")} - pipeflow explore`;
    page.load(read(answer.data));
  };
  link.listen((fields) => server.follow("plan", fields, show, refuse));
}
