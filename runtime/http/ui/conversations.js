// The side list: a listbox in which the arrow keys move and Enter opens. It is read page by page, the latest first.

import { ask } from "./api.js";

const PAGE = 100;

export class ConversationList {
  // `open(conversation)` is called with what the user chooses.
  constructor(list, more, open) {
    Object.assign(this, { list, more, open, entries: new Map(), active: null, last: null });
    list.addEventListener("keydown", (event) => this.press(event));
    list.addEventListener("click", (event) => this.click(event.target.closest("[role=option]")));
    more.addEventListener("click", () => this.readMore());
  }

  async read() {
    this.entries.clear();
    this.list.replaceChildren();
    this.active = this.last = null;
    await this.readMore();
  }

  async readMore() {
    const after = this.last === null ? "" : `&after=${encodeURIComponent(this.last)}`;
    const page = await ask("GET", `v1/conversations?limit=${PAGE}${after}`);
    for (const conversation of page.data) {
      if (!this.entries.has(conversation.id)) this.list.append(this.entry(conversation));
    }
    this.last = page.last_id;
    this.more.hidden = !page.has_more;
  }

  // What the server says of a conversation now; a new one goes on top.
  update(conversation) {
    if (this.entries.has(conversation.id)) this.describe(conversation);
    else this.list.prepend(this.entry(conversation));
  }

  remove(id) {
    const element = this.entries.get(id)?.element;
    if (!element) return;
    if (this.active === element) this.activate(element.nextElementSibling ?? element.previousElementSibling);
    element.remove();
    this.entries.delete(id);
  }

  // Marks the conversation that is open, if any.
  select(id) {
    for (const [name, { element }] of this.entries) element.setAttribute("aria-selected", String(name === id));
    const element = this.entries.get(id)?.element;
    if (element) this.activate(element);
  }

  entry(conversation) {
    const element = document.createElement("li");
    element.setAttribute("role", "option");
    element.setAttribute("aria-selected", "false");
    element.id = `conversation-${this.count = (this.count ?? 0) + 1}`;
    element.append(document.createElement("span"), document.createElement("small"));
    this.entries.set(conversation.id, { element, conversation });
    this.describe(conversation);
    return element;
  }

  describe(conversation) {
    const entry = this.entries.get(conversation.id);
    entry.conversation = conversation;
    const [name, about] = entry.element.children;
    name.textContent = conversation.id;
    about.textContent = `${conversation.tokens} tokens${conversation.pinned_until ? ", pinned" : ""}`;
  }

  activate(element) {
    this.active?.classList.remove("active");
    this.active = element;
    if (!element) {
      this.list.removeAttribute("aria-activedescendant");
      return;
    }
    element.classList.add("active");
    this.list.setAttribute("aria-activedescendant", element.id);
    element.scrollIntoView({ block: "nearest" });
  }

  press(event) {
    const { active, list } = this;
    const targets = {
      ArrowDown: () => (active ? active.nextElementSibling : list.firstElementChild),
      ArrowUp: () => (active ? active.previousElementSibling : list.lastElementChild),
      Home: () => list.firstElementChild,
      End: () => list.lastElementChild,
    };
    if (event.key === "Enter" || event.key === " ") this.click(active);
    else if (event.key in targets) this.activate(targets[event.key]() ?? active);
    else return;
    event.preventDefault();
  }

  click(element) {
    for (const entry of this.entries.values()) {
      if (entry.element === element) this.open(entry.conversation.id);
    }
  }
}
