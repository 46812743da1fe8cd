// One conversation at a time. The server keeps its history: a turn at its end sends only the new message, a turn in its
// middle (a reply once more, an edited message) all messages up to there.

import { ask, conversationPath, events } from "./api.js";
import { MessageView } from "./message.js";
import { sourceStrip } from "./strip.js";

const NEAR_END = 80; // pixels: who has scrolled up further keeps their place
const LOOK_AGAIN = 200; // ms, while a turn of the conversation is in flight
const LEFT = new DOMException("another conversation is opened", "AbortError");
const STOPPED = new DOMException("the reply is stopped", "AbortError");

const $ = (id) => document.getElementById(id);
const pause = (time) => new Promise((resolve) => setTimeout(resolve, time));

export class Chat {
  // `model` is to be set. `changed(conversation)` is called with what the server says after a turn; `chunkTokens()` says how long chunks are.
  constructor(changed, chunkTokens) {
    Object.assign(this, { changed, chunkTokens, model: null, id: null, opening: null, abort: null });
    this.messages = []; // as the server has them
    this.views = []; // of the same messages
    this.handlers = {
      edit: (view, text) => this.edit(view, text),
      regenerate: (view) => this.regenerate(view),
    };
    $("say").addEventListener("submit", (event) => {
      event.preventDefault();
      this.say();
    });
    $("text").addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      $("say").requestSubmit();
    });
    document.addEventListener("keydown", (event) => event.key === "Escape" && this.stop());
    $("stop").addEventListener("click", () => this.stop());
    for (const example of document.querySelectorAll("#welcome button")) {
      example.addEventListener("click", () => {
        $("text").value = example.textContent;
        $("say").requestSubmit();
      });
    }
  }

  // Shows the conversation with its messages. A reply that is still coming is stopped.
  async open(id) {
    this.stop(LEFT);
    const opening = ask("GET", conversationPath(id));
    this.opening = opening;
    try {
      const conversation = await opening;
      if (this.opening !== opening) return; // another one has been opened meanwhile
      this.show(conversation);
      if (conversation.in_flight) this.follow(id).catch((error) => this.fail(error.message));
    } finally {
      if (this.opening === opening) this.opening = null;
    }
  }

  // A turn is in flight that this page has not sent, or had sent before it was loaded again. A turn of this page that
  // ends before it shows the newer messages.
  async follow(id) {
    const note = this.views.at(-1)?.note("A reply to another message is coming.");
    const { messages } = this;
    let conversation;
    try {
      conversation = await this.settled(id, () => this.messages === messages);
    } finally {
      note?.remove();
    }
    if (conversation && !this.abort) this.show(conversation);
  }

  // The conversation when no turn of it is in flight, null if `wanted()` is no longer true.
  async settled(id, wanted) {
    for (;;) {
      const conversation = await ask("GET", conversationPath(id));
      if (!wanted()) return null;
      if (!conversation.in_flight) return conversation;
      await pause(LOOK_AGAIN);
    }
  }

  show(conversation) {
    this.id = conversation.id;
    this.fail("");
    this.messages = conversation.messages;
    this.views = this.messages.map((message) => new MessageView(message, this.handlers));
    $("messages").replaceChildren(...this.views.map(({ element }) => element));
    this.showEnd();
    this.changed(conversation);
  }

  // Nothing is open: the next message begins a conversation.
  close() {
    this.stop(LEFT);
    this.id = this.opening = null;
    this.fail("");
    this.messages = [];
    this.views = [];
    $("messages").replaceChildren();
    this.changed(null);
  }

  stop(reason = STOPPED) {
    this.abort?.abort(reason);
  }

  say() {
    const said = $("text").value.trim();
    if (!said || this.abort) return;
    $("text").value = "";
    return this.turn({ role: "user", content: said }, null);
  }

  // The message and all below it are replaced.
  edit(view, said) {
    return this.turnWithin({ role: "user", content: said }, view);
  }

  // The reply is replaced.
  regenerate(view) {
    return this.turnWithin(null, view);
  }

  async turnWithin(message, view) {
    if (this.isCurrent) return this.turn(message, this.views.indexOf(view));
    if (message) this.putBack(message.content);
    await this.open(this.id);
    this.fail("Not sent: another client has changed this chat, which is shown as it is now.");
  }

  // Sends the message, if any, behind the first `place` messages; null: behind all of them.
  async turn(message, place) {
    const { signal } = (this.abort = new AbortController());
    this.working(true, "The reply is coming.");
    this.fail("");
    const reply = new MessageView({ role: "assistant", content: "" }, this.handlers);
    const added = message ? [new MessageView(message, this.handlers), reply] : [reply];
    let outcome = "The reply has ended.";
    try {
      await this.opening; // who has just chosen a conversation writes to that one
      for (const { element } of this.views.splice(place ?? this.views.length)) element.remove();
      this.views.push(...added);
      $("messages").append(...added.map(({ element }) => element));
      reply.coming(true);
      this.working(true, "The reply is coming.");
      this.showEnd();
      this.id ??= await this.begin(message.content);
      await this.reply(this.id, turnBody(this.messages, message, place), reply, signal);
      await this.look(this.id, reply);
    } catch (error) {
      if (signal.reason === LEFT) outcome = "";
      else if (signal.reason === STOPPED) outcome = await this.keepPart(message, place, added);
      else outcome = this.takeBack(message, place, added, error.message);
    } finally {
      this.abort = null;
      this.keepingPlace(() => reply.coming(false));
      this.working(false, outcome);
    }
  }

  // What the server has after a turn.
  async look(id, reply) {
    const conversation = await ask("GET", conversationPath(id));
    if (this.id !== id) return;
    this.messages = conversation.messages;
    if (this.isCurrent) reply.show(this.messages.at(-1));
    this.changed(conversation);
  }

  // False if another client has changed the conversation since it was opened.
  get isCurrent() {
    return this.messages.length === this.views.length;
  }

  // The server stores what it had generated when the reply was stopped: that is shown.
  async keepPart(message, place, added) {
    const id = this.id;
    try {
      const conversation = id && (await this.settled(id, () => this.id === id));
      if (!conversation) return "";
      if (JSON.stringify(conversation.messages) === JSON.stringify(this.messages)) {
        this.show(conversation);
        if (message) this.putBack(message.content);
        return "Stopped before the reply began. Nothing is kept of this turn.";
      }
      if (conversation.messages.length !== this.views.length) this.show(conversation);
      this.messages = conversation.messages;
      const shown = this.views.at(-1);
      this.keepingPlace(() => {
        shown.show(this.messages.at(-1));
        shown.note("Stopped. This part is kept.");
      });
      this.changed(conversation);
      return "Stopped. This part of the reply is kept.";
    } catch (error) {
      return this.takeBack(message, place, added, error.message);
    }
  }

  // The server has kept nothing of a turn that failed: its message goes back into the box.
  takeBack(message, place, added, reason) {
    if (message) this.putBack(message.content);
    if (place !== null) {
      this.restore();
    } else {
      this.views.splice(this.messages.length);
      const lost = !added.at(-1).isEmpty;
      if (lost) added.at(-1).note(`This turn failed: ${reason}`);
      for (const { element, actions } of added) {
        if (!lost) element.remove();
        element.classList.add("lost");
        actions.remove();
      }
    }
    this.fail(`Not sent: ${reason}`);
    return `This turn failed: ${reason}`;
  }

  // The messages as the server has them.
  restore() {
    this.views = this.messages.map((message) => new MessageView(message, this.handlers));
    $("messages").replaceChildren(...this.views.map(({ element }) => element));
  }

  putBack(text) {
    $("text").value = [text, $("text").value].filter(Boolean).join("\n");
  }

  fail(words) {
    $("error").textContent = words;
    if (words) $("text").setAttribute("aria-invalid", "true");
    else $("text").removeAttribute("aria-invalid");
  }

  async begin(said) {
    const conversation = await ask("POST", "v1/conversations", {});
    this.changed({ ...conversation, title: said });
    return conversation.id;
  }

  async reply(id, turn, reply, signal) {
    const asked = performance.now();
    const times = { first: 0, last: 0 };
    let frame = 0; // the reply is drawn once a frame, however many pieces come
    const body = {
      model: this.model,
      conversation: id,
      ...turn,
      max_tokens: $("max-tokens").valueAsNumber || undefined,
      temperature: $("temperature").valueAsNumber,
      stream: true,
      stream_options: { include_usage: true },
      return_sources: true,
      on_disconnect: "store",
    };
    for await (const event of events("v1/chat/completions", body, signal)) {
      times.last = performance.now() - asked;
      times.first ||= times.last;
      for (const { delta } of event.choices) reply.grow(delta);
      frame ||= requestAnimationFrame(() => {
        frame = 0;
        this.keepingPlace(() => reply.draw());
      });
      if (event.usage) {
        const { prompt_tokens_details: tokens, completion_tokens: generated } = event.usage;
        reply.actions.before(sourceStrip(tokens, this.chunkTokens(), generated, times));
      }
    }
  }

  working(yes, words) {
    $("messages").setAttribute("aria-busy", String(yes)); // a screen reader reads the reply when it is whole
    $("send").hidden = yes;
    $("stop").hidden = !yes;
    for (const button of $("messages").querySelectorAll(".changes")) button.disabled = yes;
    $("status").textContent = words;
  }

  atEnd() {
    const { scrollTop, scrollHeight, clientHeight } = $("messages");
    return scrollHeight - scrollTop - clientHeight < NEAR_END;
  }

  // Who reads the end sees it afterwards, too.
  keepingPlace(change) {
    const follows = this.atEnd();
    change();
    if (follows) this.showEnd();
  }

  showEnd() {
    $("messages").scrollTop = $("messages").scrollHeight;
  }
}

// The part of a request's body that says what the turn continues.
function turnBody(messages, message, place) {
  const added = message ? [message] : [];
  if (place === null) return { history: "server", messages: added };
  return { messages: [...messages.slice(0, place).map(sendable), ...added] };
}

// The server shows the arguments of a call as its template reads them. They are sent as text.
function sendable(message) {
  if (!message.tool_calls) return message;
  const tool_calls = message.tool_calls.map((call) => {
    const given = call.function.arguments;
    const text = typeof given === "string" ? given : JSON.stringify(given);
    return { ...call, function: { ...call.function, arguments: text } };
  });
  return { ...message, tool_calls };
}
