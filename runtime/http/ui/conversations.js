// The side list: a listbox in which the arrow keys move and Enter opens. It is read page by page, the latest first; each
// entry has a bar of its chunks by tier.

import { ask } from "./api.js";
import { TIERS } from "./strip.js";

const PAGE = 100;
const MOST_TRIES = 10; // to find in the list what the loop knows: a turn is stored a moment later, a response never

export class ConversationList {
  // `open(conversation)` is called with what the user chooses.
  constructor(list, more, open) {
    Object.assign(this, { list, more, open, entries: new Map(), tries: new Map(), active: null, last: null });
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

  // Shows the chunks of conversations, from the server's state. Other conversations are read first, then shown at the top.
  async showChunks(conversations) {
    let unknown = false;
    for (const [id, chunks] of conversations) {
      const entry = this.entries.get(id);
      if (entry) {
        this.drawBar(entry, chunks);
        continue;
      }
      const tries = this.tries.get(id) ?? 0;
      unknown ||= tries < MOST_TRIES;
      this.tries.set(id, tries + 1);
    }
    if (!unknown) return;
    const page = await ask("GET", `v1/conversations?limit=${PAGE}`);
    let older = null;
    for (const conversation of page.data.toReversed()) {
      if (this.entries.has(conversation.id)) this.describe(conversation);
      else if (older) older.before(this.entry(conversation));
      else this.list.prepend(this.entry(conversation));
      older = this.entries.get(conversation.id).element;
    }
  }

  title(id) {
    const conversation = this.entries.get(id)?.conversation;
    return conversation?.title ?? (conversation?.tokens === 0 ? "New conversation" : id);
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
    element.append(...["span", "small", "i"].map((name) => document.createElement(name)));
    element.lastChild.className = "bar";
    this.entries.set(conversation.id, { element, conversation, chunks: "" });
    this.describe(conversation);
    return element;
  }

  describe(conversation) {
    const entry = this.entries.get(conversation.id);
    entry.conversation = conversation;
    const [name, about] = entry.element.children;
    name.textContent = this.title(conversation.id);
    entry.element.title = conversation.id;
    const facts = [`${conversation.tokens.toLocaleString("en")} tokens`];
    if (conversation.parent) facts.push("fork");
    if (conversation.pinned_until) facts.push("pinned");
    about.textContent = facts.join(" · ");
  }

  // The style sheet draws the bar from where each tier ends, in percent.
  drawBar(entry, chunks) {
    const drawn = Object.values(chunks).join();
    if (entry.chunks === drawn) return;
    entry.chunks = drawn;
    const all = Object.values(chunks).reduce((sum, count) => sum + count, 0);
    let end = 0;
    for (const tier of TIERS) {
      end += chunks[tier];
      entry.element.lastChild.style.setProperty(`--${tier}-end`, `${(100 * end) / (all || 1)}%`);
    }
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
