/* Export: a menu that saves a schedule as a file, or copies what makes it again. Must not contain: what is in them, but
 * for a picture's pixels. */

import {labelOf} from "./beside.js";
import {make} from "./controls.js";
import {by} from "./page.js";

const SHARPNESS = 2; // pixels of a saved picture per pixel of the drawing
const WIDEST = 16000; // pixels

function save(name, content, type) {
  const href = URL.createObjectURL(new Blob([content], {type}));
  make("a", {href, download: name}).click();
  setTimeout(() => URL.revokeObjectURL(href), 60_000);
}

/** An SVG drawing as a PNG file. */
async function pixels(svg) {
  const image = new Image();
  image.src = URL.createObjectURL(new Blob([svg], {type: "image/svg+xml"}));
  await image.decode();
  const ratio = Math.min(SHARPNESS, WIDEST / Math.max(image.width, image.height));
  const canvas = make("canvas", {width: image.width * ratio, height: image.height * ratio});
  canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
  URL.revokeObjectURL(image.src);
  return new Promise((resolve) => canvas.toBlob(resolve, "image/png"));
}

export function makeExport({link, server, shown}) {
  const which = make("select", {ariaLabel: "Schedule to export", title: "The schedule that is saved or copied"});
  const text = make("textarea", {readOnly: true, rows: 5, hidden: true, ariaLabel: "Copied text", title: "What was copied"});
  const said = make("output");
  const stem = () => labelOf(link, which.value).replace(/[^\w.-]+/g, "-").replace(/-$/, "");
  const ask = (question) => server.ask(question, {...link.fields, schedule: which.value});

  async function copy(found, none = "") {
    text.value = found ?? "";
    text.hidden = !found;
    if (!found) return none;
    text.select();
    return navigator.clipboard.writeText(found).then(() => "Copied.", () => "Press Ctrl+C to copy.");
  }

  const file = (kind, type) => async () => save(`${stem()}.${kind}`, (await ask(kind)).text, type);
  const actions = [
    ["Table (CSV)", "Save the rows, for pipeflow verify and the engine", file("csv", "text/csv")],
    ["Times (JSON)", "Save the timeline, for Timeline.from_json", file("json", "application/json")],
    ["Picture (SVG)", "Save the timeline as a drawing", file("svg", "image/svg+xml")],
    ["Picture (PNG)", "Save the timeline as an image",
      async () => save(`${stem()}.png`, await pixels((await ask("svg")).text), "image/png")],
    ["Copy Python", "Copy the code that makes the same timeline", async () => copy((await ask("code")).python)],
    ["Copy command", "Copy the pipeflow draw command for this timeline",
      async () => copy((await ask("code")).command, "No options of pipeflow draw say this: copy the link.")],
    ["Copy link", "Copy the command that opens this page again", () => copy(`pipeflow explore --link '${link.address()}'`)],
  ];
  const buttons = actions.map(([textContent, title, action]) => {
    const button = make("button", {type: "button", textContent, title});
    button.addEventListener("click", async () => {
      said.value = "";
      said.value = await action().then((done) => done ?? "Saved.", (error) => error.message);
    });
    return button;
  });
  const summary = make("summary", {textContent: "Export", title: "Save or copy a schedule"});
  const menu = make("details", {id: "export", className: "menu"}, summary,
    make("div", {role: "group", ariaLabel: "Export"}, which, ...buttons, said, text));
  by("tools").append(menu);
  shown.listen(({schedules}) => {
    const chosen = which.value;
    which.replaceChildren(...schedules.map((name) => make("option", {value: name, textContent: labelOf(link, name)})));
    if (schedules.includes(chosen)) which.value = chosen;
    which.hidden = schedules.length < 2;
    text.hidden = true;
    said.value = "";
  });
}
