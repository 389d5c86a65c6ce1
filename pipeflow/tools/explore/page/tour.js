/* Tour: a card with a question, what to try, and the answer, which appears when it is reached. The field "tour" of the
 * link is the number of the step. Must not contain: texts of steps, and when they are reached; both come from Python. */

import {make} from "./controls.js";
import {by} from "./page.js";

function button(textContent, title, listener, className = "") {
  const element = make("button", {type: "button", textContent, title, className});
  element.addEventListener("click", listener);
  return element;
}

/** The card and its parts. */
function makeCard(steps) {
  const options = steps.map((step, index) => make("option", {value: index + 1, textContent: `${index + 1}. ${step.title}`}));
  const parts = {
    list: make("select", {ariaLabel: "Step of the tour", title: "Go to another question"}, ...options),
    question: make("h2", {tabIndex: -1}),
    look: make("p"),
    task: make("p", {className: "task"}),
    answer: make("div", {className: "answer", ariaLive: "polite"}),
    buttons: make("div", {className: "steps"}),
  };
  const {list, question, look, task, answer, buttons} = parts;
  const head = make("header", {}, "Tour", list, make("span", {textContent: `of ${steps.length}`}));
  const card = make("aside", {id: "tour", ariaLabel: "Tour", hidden: true}, head, question, look, task, answer, buttons);
  return {card, parts};
}

/** A paragraph with a title. */
const told = (title, text) => make("p", {}, make("strong", {textContent: `${title} `}), text);

export function makeTour({table, link, server, page, shown}) {
  const steps = JSON.parse(by("steps").textContent);
  const {card, parts} = makeCard(steps);
  let number = 0; // of the step that is shown; 0: none
  let reached = false; // whether what is shown reaches it
  let found = false; // whether its answer is shown
  let left = null; // the fields when the reader left before the end

  const changed = table.filter(({group, shown, name}) => group || (shown && !["colour", "tour"].includes(name)));
  const none = Object.fromEntries(changed.map(({name}) => [name, ""]));
  const set = (fields) => link.set({...none, ...fields});
  const go = (next) => {
    set({...steps[next - 1].start, tour: String(next)});
    page.showAll();
    parts.question.focus();
  };
  const leave = (fields) => {
    left = fields;
    link.set({tour: ""});
    opener.focus();
  };
  const opener = button("Tour", "Learn to read schedules by ten questions", () => {
    if (left) set(left);
    else go(1);
  }, "open-tour");
  const back = button("Back", "The question before this one", () => go(number - 1));
  const next = button("Next", "The question after this one", () => {
    if (number < steps.length) go(number + 1);
    else leave(null);
  }, "next");
  const goal = button("Show me", "Set what the question asks for", () => set(steps[number - 1].goal));
  const end = button("Leave", "Close the tour; the button Tour goes on here", () => leave(link.fields), "leave");
  parts.buttons.append(back, goal, next, end);
  parts.list.addEventListener("change", () => go(Number(parts.list.value)));
  document.querySelector(".bar .help").before(opener);
  document.querySelector(".bar").after(card);

  /** Shows a step, without its answer. */
  function show(step) {
    reached = found = false;
    parts.list.value = number;
    parts.question.textContent = step.question;
    parts.look.textContent = step.look;
    parts.task.replaceChildren(...told("Try:", step.task).childNodes);
    parts.answer.replaceChildren();
    back.disabled = number === 1;
    next.textContent = number === steps.length ? "Finish" : "Next";
  }

  /** Shows the answer of a step. */
  function tell(step) {
    found = true;
    const more = Object.entries(step.more).map(([name, fields]) => {
      return make("a", {href: link.address({...fields, tour: number}), textContent: name});
    });
    parts.answer.replaceChildren(make("p", {textContent: step.answer}), told("Cost:", step.cost));
    if (more.length) parts.answer.append(make("p", {className: "more"}, make("strong", {textContent: "See also:"}), ...more));
  }

  link.listen((fields) => {
    const asked = Math.min(Math.trunc(Number(fields.tour)) || 0, steps.length);
    const before = number;
    number = Math.max(asked, 0);
    card.hidden = number === 0;
    opener.hidden = number > 0;
    document.body.classList.toggle("touring", number > 0);
    if (number === before) return;
    if (number) show(steps[number - 1]);
    for (const {name} of table) {
      const asks = number > 0 && steps[number - 1].controls.includes(name);
      const control = by(`field-${name}`)?.closest(".control");
      control?.classList.toggle("asked", asks);
      if (asks && control?.parentElement.matches("details")) control.parentElement.open = true;
    }
    ask();
  });
  const tellIfReached = () => { if (number && reached && !found) tell(steps[number - 1]); };
  by("controls").addEventListener("change", tellIfReached);
  function ask() {
    if (!number || found) return;
    const asked = number;
    const hear = (answer) => {
      reached = number === asked && answer.reached.includes(number);
      if (!by("controls").querySelector("input:active")) tellIfReached(); // else the slider would move under the pointer
    };
    server.follow("tour", link.fields, hear, () => {});
  }
  shown.listen(ask);
}
