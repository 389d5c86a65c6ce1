/* Shown: the timelines of the schedules that the link names, as the server answered last. */

import {read} from "./data.js";
import {by} from "./page.js";

/** The block of a chart that has the action and the rank of a block that was drawn before. */
function same({timeline}, block) {
  return (block && timeline.rows[block.rank]?.blocks.find(({action}) => action === block.action)) ?? null;
}

export class Shown {
  answer = null;
  #page;
  #listeners = [];

  /** `table` has the fields; those that only say how timelines are shown need no new answer. */
  constructor(table, link, server, page) {
    this.#page = page;
    const made = new Set(table.filter((field) => !field.shown).map((field) => field.name));
    link.listen((fields, changed) => {
      if (this.answer && !changed.some((name) => made.has(name))) return;
      server.follow("plan", fields, (answer) => this.#show(answer, fields), (message) => this.refuse(message));
    });
  }

  /** Calls `listener(answer, fields)` after each new answer, to these fields, was put onto the page. */
  listen(listener) {
    this.#listeners.push(listener);
  }

  #show(answer, fields) {
    this.answer = answer;
    by("problem").hidden = true;
    by("shown").classList.remove("stale");
    for (const part of ["legend", "charts", "tables"]) by(part).innerHTML = answer[part];
    document.title = `${answer.titles.join(", ")} - pipeflow explore`;
    const focused = this.#page.charts.map(({focus}) => focus);
    this.#page.load(read(answer.data));
    this.#page.charts.forEach((chart, number) => { chart.focus = same(chart, focused[number]); });
    for (const listener of this.#listeners) listener(answer, fields);
  }

  /** Says what is wrong; what was shown before stays, and is faint. */
  refuse(message) {
    by("problem").textContent = message;
    by("problem").hidden = false;
    by("shown").classList.add("stale");
  }
}
