/* Prebuilt: takes the place of server.js in a page that has its answers in itself. It has the same interface. Must not
 * contain: requests. */

import {by} from "./page.js";

/** An answer that says what is wrong with the question. */
export class Refusal extends Error {}

/** The answers in the document, which are compressed, and have numbers of timelines in place of these. */
async function unpacked() {
  const bytes = Uint8Array.from(atob(by("answers").textContent), (letter) => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  const [answers, timelines] = await new Response(stream).json();
  for (const {data} of Object.values(answers.plan)) data.timelines = data.timelines.map((place) => timelines[place]);
  return answers;
}

export class Server {
  #table = JSON.parse(by("fields").textContent).filter((field) => field.asked);
  #answers = unpacked();

  /** The name of the answer for fields; Python names them in the same way. */
  #name(fields) {
    const value = (field) => fields[field.name] || field.default;
    const names = value(this.#table.find((field) => field.name === "schedule")).split(",");
    const applies = ({takers, beside}) => !takers.length || names.some((name) => takers.includes(name)) || fields[beside];
    const given = this.#table.filter((field) => value(field) !== field.default && applies(field));
    return given.map((field) => `${field.name}=${value(field)}`).join("&");
  }

  /** Returns the answer to `question` with fields. Throws a Refusal if it is not here. */
  async ask(question, fields) {
    const known = (await this.#answers)[question];
    const answer = known?.[this.#name(fields)];
    if (!answer) {
      const why = known ? "This page has only some states, and this is none of them." : "This page cannot do that.";
      const link = String(new URLSearchParams(fields));
      throw new Refusal(`${why} On your machine, use this command: pipeflow explore${link && ` --link '#${link}'`}`);
    }
    return structuredClone(answer);
  }

  /** Calls `tell(answer)` or `refuse(message)`. */
  async follow(question, fields, tell, refuse) {
    return this.ask(question, fields).then(tell, (error) => {
      if (!(error instanceof Refusal)) throw error;
      refuse(error.message);
    });
  }
}
