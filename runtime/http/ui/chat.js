// One conversation at a time. The server keeps its history: only what is new is sent.

import { ask, conversationPath, events } from "./api.js";
import { Markdown } from "./markdown.js";
import { sourceStrip } from "./strip.js";

const NEAR_END = 80; // pixels: who has scrolled up further keeps their place

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
    for (const example of document.querySelectorAll("#welcome button")) {
      example.addEventListener("click", () => {
        $("text").value = example.textContent;
        $("say").requestSubmit();
      });
    }
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
    this.fail("");
    $("messages").replaceChildren(...conversation.messages.map(({ role, content }) => message(role, text(content))));
    this.showEnd();
    this.changed(conversation);
  }

  // Nothing is open: the next message begins a conversation.
  close() {
    this.stop();
    this.id = this.opening = null;
    this.fail("");
    $("messages").replaceChildren();
    this.changed(null);
  }

  stop() {
    this.abort?.abort();
  }

  async say() {
    const said = $("text").value.trim();
    if (!said || this.abort) return;
    const { signal } = (this.abort = new AbortController());
    this.working(true, "The reply is coming.");
    this.fail("");
    const turn = [message("user", said), message("assistant", "")];
    let outcome = "The reply has ended.";
    try {
      await this.opening; // who has just chosen a conversation writes to that one
      $("text").value = "";
      $("messages").append(...turn);
      this.showEnd();
      this.id ??= await this.begin(said);
      const id = this.id;
      await this.reply(id, said, turn[1], signal);
      const conversation = await ask("GET", conversationPath(id));
      if (this.id === id) this.changed(conversation);
    } catch (error) {
      outcome = error.name === "AbortError" ? "Stopped. The server forgets this turn." : this.takeBack(turn, said, error);
      turn[1].append(note(outcome));
    } finally {
      this.abort = null;
      turn[1].classList.remove("coming");
      this.working(false, outcome);
      this.showEnd();
    }
  }

  // The server has kept nothing of a turn that failed: its message goes back into the box.
  takeBack(turn, said, error) {
    const lost = turn[1].querySelector(".words").textContent !== "";
    for (const part of turn) lost ? part.classList.add("lost") : part.remove();
    $("text").value = [said, $("text").value].filter(Boolean).join("\n");
    this.fail(error.message);
    return `This turn failed: ${error.message}`;
  }

  fail(words) {
    $("error").textContent = words && `Not sent: ${words}`;
    if (words) $("text").setAttribute("aria-invalid", "true");
    else $("text").removeAttribute("aria-invalid");
  }

  async begin(said) {
    const conversation = await ask("POST", "v1/conversations", {});
    this.changed({ ...conversation, title: said });
    return conversation.id;
  }

  async reply(id, said, reply, signal) {
    const asked = performance.now();
    const times = { first: 0, last: 0 };
    const markdown = new Markdown(reply.querySelector(".words"));
    reply.classList.add("coming");
    let words = "";
    const body = {
      model: this.model,
      conversation: id,
      history: "server",
      messages: [{ role: "user", content: said }],
      max_tokens: $("max-tokens").valueAsNumber || undefined,
      temperature: $("temperature").valueAsNumber,
      stream: true,
      stream_options: { include_usage: true },
      return_sources: true,
    };
    for await (const event of events("v1/chat/completions", body, signal)) {
      const follows = this.atEnd();
      times.last = performance.now() - asked;
      times.first ||= times.last;
      for (const { delta } of event.choices) words += delta.content ?? "";
      markdown.show(words);
      if (event.usage) {
        const { prompt_tokens_details: tokens, completion_tokens: generated } = event.usage;
        reply.append(sourceStrip(tokens, this.chunkTokens(), generated, times));
      }
      if (follows) this.showEnd();
    }
  }

  working(yes, words) {
    $("messages").setAttribute("aria-busy", String(yes)); // a screen reader reads the reply when it is whole
    $("send").hidden = yes;
    $("stop").hidden = !yes;
    $("status").textContent = words;
  }

  atEnd() {
    const { scrollTop, scrollHeight, clientHeight } = $("messages");
    return scrollHeight - scrollTop - clientHeight < NEAR_END;
  }

  showEnd() {
    $("messages").scrollTop = $("messages").scrollHeight;
  }
}

function message(role, content) {
  const article = document.createElement("article");
  article.className = role;
  const who = document.createElement("h3");
  who.textContent = role === "user" ? "You" : role[0].toUpperCase() + role.slice(1);
  const words = document.createElement("div");
  words.className = "words";
  if (role === "assistant") new Markdown(words).show(content);
  else words.textContent = content;
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
  return (content ?? []).map((part) => part.text ?? `(${part.type})`).join("\n");
}
