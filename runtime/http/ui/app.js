// Puts the page together: the list, the chat, the map and the timeline, and asks for the server's state while it shows.

import { ask, conversationPath, setKey } from "./api.js";
import { Timeline } from "./charts.js";
import { Chat } from "./chat.js";
import { ConversationList } from "./conversations.js";
import { ChunkMap } from "./map.js";
import { nameDevice, showChunks } from "./strip.js";
import { Tiers } from "./tiers.js";

const INTERVAL = 500; // ms between two looks at the server
const PATIENCE = 2000; // ms, when it does not answer
const DEFAULT_CHUNK = 32;

const $ = (id) => document.getElementById(id);
const narrow = matchMedia("(max-width: 60rem)"); // as in style.css: panels are behind buttons
let chunkTokens = 0;
let chunks = new Map(); // of each conversation by tier
let polling = false;

const list = new ConversationList($("conversations"), $("more"), open);
const map = new ChunkMap($("map"), $("readout"), open, (id) => list.title(id));
const tiers = new Tiers($("tiers"));
const timeline = new Timeline($("timeline"));
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

// The name in the page's address: "" for a new chat, null for a page that was opened without one.
function addressed() {
  return new URLSearchParams(location.search).get("c");
}

// Each chat has its address, so reload and the back button work.
function setAddress(id) {
  const before = addressed();
  if (before === id) return;
  const path = `?c=${encodeURIComponent(id)}`;
  if (before === null) history.replaceState(null, "", path);
  else history.pushState(null, "", path);
}

// Opens what the address names. If there is no such chat, a new one is open.
async function openAddressed(id) {
  try {
    await chat.open(id);
  } catch (error) {
    if (error.status !== 404) throw error;
    history.replaceState(null, "", "?c=");
    chat.close();
    chat.fail(`There is no chat ${id}.`);
  }
}

addEventListener("popstate", () => attempt(() => (addressed() ? openAddressed(addressed()) : chat.close())));

function open(id) {
  return attempt(async () => {
    await chat.open(id);
    $("status").textContent = `${list.title(id)} is open.`;
    showPanel(null);
    $("text").focus();
  });
}

// What the server says of the conversation that is open, null: none is.
function show(conversation) {
  for (const name of ["fork", "pin", "delete"]) $(name).disabled = conversation === null;
  $("pin").setAttribute("aria-pressed", String(Boolean(conversation?.pinned_until)));
  if (conversation) list.update(conversation);
  const title = conversation ? list.title(conversation.id) : "New conversation";
  $("title").textContent = title;
  document.title = conversation ? `${title} · Pensieve` : "Pensieve";
  setAddress(conversation?.id ?? "");
  $("id").textContent = conversation?.id ?? "";
  list.select(conversation?.id);
  map.select(conversation?.id);
  showMemory();
}

// These fields keep their values.
for (const field of [$("max-tokens"), $("temperature")]) {
  field.value = localStorage.getItem(`pensieve-${field.id}`) ?? field.value;
  field.addEventListener("change", () => localStorage.setItem(`pensieve-${field.id}`, field.value));
}

function showMemory() {
  showChunks($("memory"), chunks.get(chat.id), chunkTokens);
}

// On a narrow screen the list or the cache covers the chat, null: neither does.
function showPanel(name) {
  for (const panel of ["list", "cache"]) {
    $(panel).classList.toggle("shown", panel === name);
    $(`show-${panel}`).setAttribute("aria-expanded", String(panel === name));
  }
}

for (const name of ["list", "cache"]) {
  const button = $(`show-${name}`);
  button.addEventListener("click", () => showPanel(button.getAttribute("aria-expanded") === "true" ? null : name));
}

document.addEventListener("keydown", (event) => {
  const button = document.querySelector("header [aria-expanded=true]");
  if (event.key !== "Escape" || !button) return;
  showPanel(null);
  button.focus();
});

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

$("new").addEventListener("click", () => {
  chat.close();
  showPanel(null);
  $("text").focus();
});

$("open-form").addEventListener("submit", (event) => {
  event.preventDefault();
  const id = $("name").value.trim();
  if (!id) return;
  attempt(async () => {
    const known = list.entries.has(id) || (await ask("POST", "v1/conversations", { id }).then(() => false, exists));
    await open(id);
    $("name").value = "";
    $("status").textContent = known ? `${id} goes on.` : `${id} begins.`;
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
    const title = list.title(id);
    if (!confirm(`Delete "${title}" and all of its messages?`)) return;
    await ask("DELETE", conversationPath(id));
    list.remove(id);
    chat.close();
    $("status").textContent = `${title} is gone.`;
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
    $("load").textContent = `No figures: ${error.message}`;
    wait = PATIENCE;
  }
  setTimeout(poll, wait);
}

function draw(state) {
  nameDevice(state.tier_names.gpu);
  chunkTokens = state.chunk_tokens;
  chunks = new Map(state.conversations);
  const sums = map.update(state.conversations);
  for (const [tier, count] of Object.entries(sums)) {
    document.querySelector(`[data-tier=${tier}]`).textContent = count.toLocaleString("en");
  }
  $("no-chunks").hidden = state.conversations.length > 0;
  $("cache").classList.toggle("no-disk", !("disk" in state.slots));
  tiers.update(state, INTERVAL);
  timeline.update(state);
  showMemory();
  attempt(() => list.showChunks(state.conversations));
  showReplica(state);
  $("load").textContent = `${chat.model} · ${state.running} running, ${state.waiting} waiting`;
}

// Which server this is, and where its histories are.
function showReplica({ replica, histories: { store, healthy, reason } }) {
  const histories = healthy ? store : `${store}: ${reason}`;
  $("replica").textContent = [replica, histories].filter(Boolean).join(" · ");
  $("replica").classList.toggle("wrong", !healthy);
}

// Opens the conversation of the address, or the newest one.
function start() {
  attempt(async () => {
    chat.model = (await ask("GET", "v1/models")).data[0].id;
    await list.read();
    const newest = list.entries.keys().next().value;
    if (!polling) poll();
    polling = true;
    const first = addressed() ?? newest;
    if (first && chat.id === null && !chat.abort) await openAddressed(first);
    if (!narrow.matches) $("text").focus();
  });
}

start();
