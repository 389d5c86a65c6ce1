/* Files: timelines, schedules and traces that the reader opens, dropped onto the page or chosen. They are too long for
 * a link, so the browser keeps them for this tab, and they are sent with each question about them. */

import {namesIn, showNames} from "./beside.js";
import {make} from "./controls.js";
import {by} from "./page.js";
import {Refusal} from "./server.js";

const KEY = "file:"; // what their names begin with, in the link and in the browser's store
const LARGEST = 3.9e6; // bytes of a request's body, less than the server takes
const CATEGORIES = ["user_annotation", "cpu_op", "cuda_runtime", "cuda_driver", "kernel", "gpu_memcpy", "gpu_memset"];
const ARGUMENTS = ["Sequence number", "Fwd thread id", "correlation"];
const LONGEST = 12000; // letters of a schedule that a link may have

/** The texts of the files among the names of a link, as a field of a question. */
function filesIn(fields) {
  const names = (fields.schedule ?? "").split(",").filter((name) => name.startsWith(KEY));
  const texts = names.map((name) => [name.slice(KEY.length), sessionStorage.getItem(name)]);
  const kept = texts.filter(([, text]) => text !== null);
  return kept.length ? {files: JSON.stringify(Object.fromEntries(kept))} : {};
}

/** A name for a file in a link, which no file with another text has. */
function nameFor(file, text) {
  const [, stem, end] = /^(.*?)(\.\w{1,8})?$/.exec(file.name.replace(/[^\w.-]+/g, "-").slice(-50));
  for (let number = 1; ; number++) {
    const name = `${stem || "file"}${number > 1 ? `-${number}` : ""}${end ?? ""}`;
    if ([null, text].includes(sessionStorage.getItem(KEY + name))) return name;
  }
}

/** The text of a file, which may be compressed. */
async function textOf(file) {
  if (!file.name.endsWith(".gz")) return file.text();
  try {
    return await new Response(file.stream().pipeThrough(new DecompressionStream("gzip"))).text();
  } catch {
    throw new Refusal(`${file.name} is not gzip, or it is cut off.`);
  }
}

const isTrace = (text) => /^\s*\[\s*\{|"(traceEvents|resourceSpans)"/.test(text);

/** What JSON says; undefined for other text, which Python says what is wrong with. */
function parsed(text) {
  try {
    return JSON.parse(text);
  } catch {
    return undefined;
  }
}

/** A Chrome trace with only what tells when its actions ran; other text as it is. */
function slim(text) {
  const whole = parsed(text);
  const events = Array.isArray(whole) ? whole : whole?.traceEvents;
  if (!Array.isArray(events)) return text;
  const kept = events.filter((event) => event?.ph === "X" && CATEGORIES.includes(event.cat)).map(slimEvent);
  const {distributedInfo, host_name, baseTimeNanoseconds} = whole;
  return JSON.stringify({distributedInfo, host_name, baseTimeNanoseconds, traceEvents: kept});
}

function slimEvent({ph, cat, name, ts, dur, args}) {
  const given = Object.fromEntries(ARGUMENTS.filter((key) => args && key in args).map((key) => [key, args[key]]));
  return {ph, cat, name, ts, dur, args: given};
}

/** The files without those that are traces of ranks; instead of these, the timeline that they show. */
async function withTimeline({server}, files) {
  const texts = await Promise.all(files.map(textOf));
  const traces = files.filter((_, place) => isTrace(texts[place]));
  if (!traces.length) return files;
  const slimmed = traces.map((file) => [file.name, slim(texts[files.indexOf(file)])]);
  const asked = {files: JSON.stringify(Object.fromEntries(slimmed))};
  if (new URLSearchParams(asked).toString().length > LARGEST) {
    throw new Refusal("The traces are too long for the page. pipeflow explain reads traces of any size.");
  }
  const {timeline} = await server.ask("trace", asked);
  return [...files.filter((file) => !traces.includes(file)), new File([timeline], `${traces[0].name.split(".")[0]}.json`)];
}

/** Opens a file. Throws a Refusal, and then nothing has changed. */
async function open({link, server}, file) {
  if (file.size > LARGEST) {
    const size = file.size.toLocaleString("en");
    throw new Refusal(`${file.name} has ${size} bytes, and the page can show at most about 3 million.`);
  }
  const written = await file.text();
  const text = written.trimStart().startsWith("{") ? JSON.stringify(parsed(written)) ?? written : written; // without blanks
  const name = nameFor(file, text);
  const names = namesIn(link);
  const asked = {schedule: KEY + name, files: JSON.stringify({[name]: text})};
  const shown = filesIn(link.fields).files ?? "";
  if (new URLSearchParams({...asked, shown}).toString().length > LARGEST) {
    throw new Refusal(`${file.name} is too long to be shown${shown ? " with the files that are shown already" : ""}.`);
  }
  const {ranks, microbatches, measured, problem} = await server.ask("file", asked);
  const size = {ranks: String(ranks), microbatches: String(microbatches)};
  if (!measured && text.length <= LONGEST) {
    showNames(link, [...names, "custom"], {...size, rows: text.trim(), placement: "", rows_microbatches: "", rows_file: name});
    return;
  }
  if (problem) throw new Refusal(problem);
  try {
    sessionStorage.setItem(KEY + name, text);
  } catch {
    throw new Refusal(`${file.name} is too large for the browser to keep.`);
  }
  showNames(link, [...names, KEY + name], size);
}

export function openFiles(shared) {
  const {server, link, shown} = shared;
  const chooser = make("input", {type: "file", accept: ".json,.gz,.csv", multiple: true, hidden: true});
  const title = "A measured timeline (JSON), a schedule (CSV), or traces of all ranks (JSON); or drop them onto the page";
  const button = make("button", {type: "button", id: "open", textContent: "Open file \u2026", title});
  const problem = make("p", {className: "notice", id: "unopened", role: "alert", hidden: true});
  const priced = make("p", {className: "hint", id: "priced", hidden: true});
  by("tools").append(button, chooser);
  by("tools").after(problem, priced);
  server.more = filesIn;

  const openAll = async (files) => {
    try {
      for (const file of await withTimeline(shared, files)) await open(shared, file);
      problem.hidden = true;
    } catch (error) {
      if (!(error instanceof Refusal)) throw error;
      problem.textContent = error.message;
      problem.hidden = false;
    }
  };
  button.addEventListener("click", () => chooser.click());
  chooser.addEventListener("change", async () => { await openAll([...chooser.files]); chooser.value = ""; });
  const drops = (event) => event.dataTransfer?.types.includes("Files");
  const mark = (on) => document.documentElement.classList.toggle("dropping", on);
  window.addEventListener("dragover", (event) => { if (drops(event)) { event.preventDefault(); mark(true); } });
  window.addEventListener("dragleave", (event) => { if (!event.relatedTarget) mark(false); });
  window.addEventListener("drop", (event) => {
    if (!drops(event)) return;
    event.preventDefault();
    mark(false);
    openAll([...event.dataTransfer.files]);
  });
  link.listen(() => { problem.hidden = true; });
  shown.listen(({priced_by: name}) => {
    priced.hidden = !name;
    priced.textContent = `The costs are those measured in ${name}. If you set a cost, your costs are used instead.`;
  });
}
