/* Server: asks the server that the page came from, and says so while an answer takes long. */

import {by} from "./page.js";

const SOON = 150; // milliseconds; what takes longer is said

/** An answer that says what is wrong with the question. */
export class Refusal extends Error {}

export class Server {
  more = () => ({}); // what is sent with fields besides them
  #running = new Map(); // per question, the one that waits for its turn, or null
  #waiting = 0; // number of answers that are not there yet
  #timer = 0; // of the notice about them

  /** Asks `question` with fields, and returns the answer. Throws a Refusal. */
  async ask(question, fields) {
    this.#wait(1);
    try {
      const response = await fetch(question, {method: "POST", body: new URLSearchParams({...fields, ...this.more(fields)})});
      const answer = await response.json();
      if (!response.ok) throw new Refusal(answer.error);
      return answer;
    } catch (error) {
      if (error instanceof Refusal) throw error;
      throw new Refusal("The server does not answer. Start pipeflow explore again, and open this link with its address.");
    } finally {
      this.#wait(-1);
    }
  }

  /** Counts an answer that is waited for, or one that came. */
  #wait(more) {
    this.#waiting += more;
    if (more > 0 && this.#waiting === 1) {
      this.#timer = setTimeout(() => { by("computing").textContent = "Computing \u2026"; }, SOON);
    } else if (!this.#waiting) {
      clearTimeout(this.#timer);
      by("computing").textContent = "";
    }
  }

  /** Asks as `ask` does, one question of a kind at a time: of those that come meanwhile, the last one is asked, and the
   * others are dropped. Calls `tell(answer)` or `refuse(message)`. */
  async follow(question, fields, tell, refuse) {
    if (this.#running.has(question)) {
      this.#running.set(question, [fields, tell, refuse]);
      return;
    }
    this.#running.set(question, null);
    this.#mark();
    try {
      tell(await this.ask(question, fields));
    } catch (error) {
      if (!(error instanceof Refusal)) throw error;
      refuse(error.message);
    } finally {
      const next = this.#running.get(question);
      this.#running.delete(question);
      if (next) this.follow(question, ...next);
      this.#mark();
    }
  }

  /** Says in the document whether any question waits for its answer. */
  #mark() {
    document.documentElement.toggleAttribute("data-asking", this.#running.size > 0);
  }
}
