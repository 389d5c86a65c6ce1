/* Link: the fields of the page's address. They are everything that a reader chose, so a link shows the same to others,
 * and the browser's buttons undo and redo. Must not contain: what the fields mean. */

export class Link {
  fields = {};
  #table;
  #listeners = [];
  #moving = false;

  /** `table` has the fields that there are, with their defaults. */
  constructor(table) {
    this.#table = new Map(table.map((field) => [field.name, field]));
    window.addEventListener("popstate", () => this.open());
  }

  /** The value of a field, or its default. */
  get(name) {
    return this.fields[name] ?? this.#table.get(name).default;
  }

  /** Calls `listener(fields, changed)` now and then: whenever fields change, with the names of these. */
  listen(listener) {
    this.#listeners.push(listener);
  }

  /** The number of steps that `undo` can undo; those before this page was opened are not counted. */
  get steps() {
    return history.state?.steps ?? 0;
  }

  undo() {
    if (this.steps) history.back();
  }

  /** Reads the address. */
  open() {
    const read = Object.fromEntries(new URLSearchParams(location.hash.slice(1)));
    const changed = [...this.#table.keys()].filter((name) => (read[name] ?? "") !== (this.fields[name] ?? ""));
    this.fields = read;
    this.#tell(changed);
  }

  /** Sets fields; an empty text or the default leaves a field out. While `moving`, as a slider does, the browser's list
   * of pages gets one entry for the whole movement. `aside`, it gets none, and nobody is told. */
  set(values, {moving = false, aside = false} = {}) {
    const fields = {...this.fields, ...values};
    for (const [name, value] of Object.entries(fields)) {
      if (value === "" || value === this.#table.get(name)?.default) delete fields[name];
    }
    const changed = Object.keys(values).filter((name) => fields[name] !== this.fields[name]);
    if (aside) {
      this.fields = fields;
      history.replaceState(history.state, "", this.address());
      return;
    }
    const put = this.#moving ? "replaceState" : "pushState";
    this.#moving = moving && (this.#moving || changed.length > 0);
    if (!changed.length) return;
    this.fields = fields;
    history[put]({steps: this.steps + (put === "pushState")}, "", this.address());
    this.#tell(changed);
  }

  /** The part of the address that has the fields, or these fields. */
  address(fields = this.fields) {
    return `#${new URLSearchParams(fields)}`;
  }

  #tell(changed) {
    for (const listener of this.#listeners) listener(this.fields, changed);
  }
}
