// One message of the chat: its thoughts, words and tool calls, and the buttons for what can be done with it.

import { Markdown } from "./markdown.js";
import { codeBlock, copyButton, node } from "./nodes.js";

const NAMES = { user: "You", tool: "Tool result" };

export class MessageView {
  // `edit(view, text)` and `regenerate(view)` are called when the user wants it.
  constructor(message, { edit, regenerate }) {
    const { role } = message;
    Object.assign(this, { role, edit, thought: "", text: "", calls: [] });
    this.element = node("article", [node("h3", [NAMES[role] ?? role[0].toUpperCase() + role.slice(1)])]);
    this.element.className = role;
    this.words = node("div");
    this.words.className = "words";
    this.markdown = role === "assistant" ? new Markdown(this.words) : null;
    this.callPlace = node("div");
    this.actions = node("div", [copyButton("Copy message", () => this.text, this.words)]);
    this.actions.className = "actions";
    if (role === "user") this.addAction("Edit", "Edit message", () => this.startEdit());
    if (role === "assistant") this.addAction("Regenerate", "Regenerate reply", () => regenerate(this)).classList.add("last-only");
    this.element.append(this.words, this.callPlace, this.actions);
    this.show(message);
  }

  addAction(label, description, work) {
    const button = node("button", [label]);
    button.type = "button";
    button.title = description;
    button.className = "changes"; // not while a reply comes
    button.addEventListener("click", work);
    this.actions.append(button);
    return button;
  }

  show({ content, reasoning_content, reasoning, thinking, tool_calls }) {
    this.thought = reasoning_content ?? reasoning ?? thinking ?? "";
    this.text = textOf(content);
    this.calls = tool_calls ?? [];
    this.draw();
  }

  // One more piece of a reply, which `draw` shows.
  grow({ content, reasoning_content, tool_calls }) {
    this.thought += reasoning_content ?? "";
    this.text += content ?? "";
    if (tool_calls) this.calls = [...this.calls, ...tool_calls];
  }

  draw() {
    if (this.markdown) this.markdown.show(this.text);
    else if (this.role === "tool") this.words.replaceChildren(folded("Result", [codeBlock(this.text, "")]));
    else this.words.textContent = this.text;
    this.drawThought();
    if (this.callPlace.children.length !== this.calls.length) this.callPlace.replaceChildren(...this.calls.map(shownCall));
  }

  drawThought() {
    if (!this.thought) {
      this.thoughtPlace?.remove();
      this.thoughtPlace = null;
      return;
    }
    if (!this.thoughtPlace) {
      this.thoughtPlace = folded("", [node("div")]);
      this.thoughtPlace.classList.add("thought");
      this.words.before(this.thoughtPlace);
    }
    const [summary, place] = this.thoughtPlace.children;
    const thinks = this.element.classList.contains("coming") && !this.text && this.calls.length === 0;
    summary.textContent = thinks ? "Thinking…" : "Thoughts";
    place.textContent = this.thought;
  }

  get isEmpty() {
    return !this.thought && !this.text && this.calls.length === 0;
  }

  // A reply comes, or has ended.
  coming(yes) {
    this.element.classList.toggle("coming", yes);
    this.draw();
  }

  note(words) {
    const element = node("p", [words]);
    element.className = "note";
    this.actions.before(element);
    return element;
  }

  // The message becomes a field. It is sent with Enter, and left with Escape.
  startEdit() {
    const field = node("textarea");
    field.value = this.text;
    field.rows = Math.min(12, this.text.split("\n").length + 1);
    field.setAttribute("aria-label", "Edit message");
    field.autocomplete = "off"; // else a browser that goes back puts its text into another field
    const send = node("button", ["Send"]);
    send.className = "main changes";
    const cancel = node("button", ["Cancel"]);
    cancel.type = "button";
    const row = node("div", [node("p", ["The messages below are replaced."]), cancel, send]);
    row.className = "row";
    const form = node("form", [field, row]);
    const end = () => {
      form.replaceWith(this.words);
      this.actions.hidden = false;
    };
    const leave = () => {
      end();
      this.actions.querySelector(".changes").focus();
    };
    cancel.addEventListener("click", leave);
    field.addEventListener("keydown", (event) => {
      if (event.key === "Escape") leave();
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      if (!send.disabled) form.requestSubmit();
    });
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      if (!field.value.trim()) return;
      end();
      this.edit(this, field.value.trim());
    });
    this.words.replaceWith(form);
    this.actions.hidden = true;
    field.focus();
  }
}

function shownCall({ function: { name, arguments: given } }) {
  const value = typeof given === "string" ? JSON.parse(given || "{}") : given;
  const call = folded(`Call of ${name}`, [codeBlock(JSON.stringify(value, null, 2), "json")]);
  call.classList.add("call");
  return call;
}

function folded(title, children) {
  return node("details", [node("summary", [title]), ...children]);
}

export function textOf(content) {
  if (typeof content === "string") return content;
  return (content ?? []).map((part) => part.text ?? `(${part.type})`).join("\n");
}
