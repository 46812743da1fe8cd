// One conversation at a time. The server keeps its history: only what is new is sent.

import { ask, conversationPath, events } from "./api.js";
import { strip } from "./strip.js";

const $ = (id) => document.getElementById(id);

export class Chat {
  // `model` is to be set. `changed(conversation)` is called with what the server says after a turn; `chunkTokens()` says how long chunks are.
  constructor(changed, chunkTokens) {
    Object.assign(this, { changed, chunkTokens, model: null, id: null, opening: null, abort: null });
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
  }

  // Shows the conversation with its messages; a reply that is still coming is stopped.
  async open(id) {
    this.stop();
    const opening = ask("GET", conversationPath(id));
    this.opening = opening;
    try {
      const conversation = await opening;
      if (this.opening === opening) this.show(conversation); // else another one has been opened meanwhile
    } finally {
      if (this.opening === opening) this.opening = null;
    }
  }

  show(conversation) {
    this.id = conversation.id;
    $("messages").replaceChildren(...conversation.messages.map(({ role, content }) => message(role, text(content))));
    this.showEnd();
    this.changed(conversation);
  }

  close() {
    this.stop();
    this.id = this.opening = null;
    $("messages").replaceChildren();
  }

  stop() {
    this.abort?.abort();
  }

  async say() {
    const said = $("text").value.trim();
    if (!said || this.abort) return;
    const { signal } = (this.abort = new AbortController());
    this.working(true, "The reply is coming.");
    const reply = message("assistant", "");
    let outcome = "The reply has ended.";
    try {
      await this.opening; // who has just chosen a conversation writes to that one
      this.id ??= await this.begin();
      const id = this.id;
      $("text").value = "";
      $("messages").append(message("user", said), reply);
      await this.reply(id, said, reply, signal);
      const conversation = await ask("GET", conversationPath(id));
      if (this.id === id) this.changed(conversation);
    } catch (error) {
      outcome = error.name === "AbortError" ? "stopped; the server forgets this turn" : error.message;
      reply.append(note(outcome));
    } finally {
      this.abort = null;
      this.working(false, outcome);
      this.showEnd();
    }
  }

  async begin() {
    const conversation = await ask("POST", "v1/conversations", {});
    this.changed(conversation);
    return conversation.id;
  }

  async reply(id, said, reply, signal) {
    const asked = performance.now();
    const times = { first: 0, last: 0 };
    const body = {
      model: this.model,
      conversation: id,
      history: "server",
      messages: [{ role: "user", content: said }],
      max_tokens: $("max-tokens").valueAsNumber,
      temperature: $("temperature").valueAsNumber,
      stream: true,
      stream_options: { include_usage: true },
      return_sources: true,
    };
    for await (const event of events("v1/chat/completions", body, signal)) {
      times.last = performance.now() - asked;
      times.first ||= times.last;
      for (const { delta } of event.choices) reply.querySelector("p").append(delta.content ?? "");
      if (event.usage) {
        const { prompt_tokens_details: tokens, completion_tokens: generated } = event.usage;
        reply.append(strip(tokens, this.chunkTokens(), generated, times));
      }
      this.showEnd();
    }
  }

  working(yes, words) {
    $("messages").setAttribute("aria-busy", String(yes)); // a screen reader reads the reply when it is whole
    $("send").disabled = yes;
    $("stop").disabled = !yes;
    $("status").textContent = words;
  }

  showEnd() {
    $("messages").scrollTop = $("messages").scrollHeight;
  }
}

function message(role, content) {
  const article = document.createElement("article");
  article.className = role;
  const who = document.createElement("h3");
  who.textContent = role === "user" ? "You" : role;
  const words = document.createElement("p");
  words.textContent = content;
  article.append(who, words);
  return article;
}

function note(content) {
  const element = document.createElement("p");
  element.className = "note";
  element.textContent = content;
  return element;
}

function text(content) {
  if (typeof content === "string") return content;
  return (content ?? []).map((part) => part.text ?? `(${part.type})`).join("");
}
