// Puts the page together: the list, the chat, the map and the timeline, and asks for the server's state while it shows.

import { ask, conversationPath, setKey } from "./api.js";
import { Timeline } from "./charts.js";
import { Chat } from "./chat.js";
import { ConversationList } from "./conversations.js";
import { ChunkMap } from "./map.js";

const INTERVAL = 500; // ms between two looks at the server
const PATIENCE = 2000; // ms, when it does not answer
const DEFAULT_CHUNK = 32;

const $ = (id) => document.getElementById(id);
let chunkTokens = 0;
let polling = false;

const map = new ChunkMap($("map"), $("readout"), open);
const timeline = new Timeline($("timeline"));
const list = new ConversationList($("conversations"), $("more"), open);
const chat = new Chat(show, () => chunkTokens || DEFAULT_CHUNK);

// Runs what the user asked for; a refusal is told where a screen reader hears it.
async function attempt(work) {
  try {
    await work();
  } catch (error) {
    if (error.status === 401) askForKey();
    $("status").textContent = error.message;
  }
}

function open(id) {
  return attempt(async () => {
    await chat.open(id);
    $("status").textContent = `${id} is open.`;
    $("text").focus();
  });
}

// What the server says of the conversation that is open, null: none is.
function show(conversation) {
  for (const name of ["fork", "pin", "delete"]) $(name).disabled = conversation === null;
  $("title").textContent = conversation?.id ?? "New conversation";
  $("pin").setAttribute("aria-pressed", String(Boolean(conversation?.pinned_until)));
  if (conversation) list.update(conversation);
  list.select(conversation?.id);
  map.select(conversation?.id);
}

function askForKey() {
  $("key-form").hidden = false;
  $("load").textContent = "This server needs an API key.";
  $("key").focus();
}

$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  setKey($("key").value);
  $("key").value = "";
  $("key-form").hidden = true;
  start();
});

$("open-form").addEventListener("submit", (event) => {
  event.preventDefault();
  const id = $("name").value.trim();
  attempt(async () => {
    const known = list.entries.has(id) || (id && (await ask("POST", "v1/conversations", { id }).then(() => false, exists)));
    const made = id || (await ask("POST", "v1/conversations", {})).id;
    await open(made);
    $("name").value = "";
    $("status").textContent = known ? `${made} goes on.` : `${made} begins.`;
  });
});

function exists(error) {
  if (error.status === 409) return true;
  throw error;
}

$("fork").addEventListener("click", () =>
  attempt(async () => open((await ask("POST", `${conversationPath(chat.id)}/fork`, {})).id)),
);

$("pin").addEventListener("click", () =>
  attempt(async () => {
    const pinned = $("pin").getAttribute("aria-pressed") === "true";
    show(await ask("POST", `${conversationPath(chat.id)}/${pinned ? "unpin" : "pin"}`, {}));
  }),
);

$("delete").addEventListener("click", () =>
  attempt(async () => {
    const id = chat.id;
    if (!confirm(`Delete ${id} and all of its messages?`)) return;
    await ask("DELETE", conversationPath(id));
    list.remove(id);
    chat.close();
    show(null);
    $("status").textContent = `${id} is gone.`;
    $("text").focus();
  }),
);

async function poll() {
  let wait = INTERVAL;
  try {
    if (!document.hidden) draw(await ask("GET", "ui/state"));
  } catch (error) {
    if (error.status === 401) {
      polling = false;
      askForKey();
      return;
    }
    $("load").textContent = `No answer: ${error.message}`;
    wait = PATIENCE;
  }
  setTimeout(poll, wait);
}

function draw(state) {
  chunkTokens = state.chunk_tokens;
  const sums = map.update(state.conversations);
  for (const [tier, count] of Object.entries(sums)) {
    document.querySelector(`[data-tier=${tier}]`).textContent = count.toLocaleString("en");
  }
  timeline.update(state);
  const taken = Object.entries(state.slots).map(([tier, states]) => {
    const all = Object.values(states).reduce((total, count) => total + count, 0);
    return `${tier === "gpu" ? "GPU" : tier} slots ${all - states.free} of ${all}`;
  });
  const busy = `${state.running} running, ${state.waiting} waiting`;
  $("load").textContent = [busy, ...taken, `${state.dropped.toLocaleString("en")} chunks dropped`].join(" · ");
}

function start() {
  attempt(async () => {
    chat.model = (await ask("GET", "v1/models")).data[0].id;
    await list.read();
    if (!polling) poll();
    polling = true;
  });
}

start();
