// Shows a model's Markdown: headings, lists, tables, quotes, code, links. It makes DOM nodes, so text never becomes HTML.

import { codeBlock, node, scrollable } from "./nodes.js";

const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([^\s`]*)[^`]*$/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*?)\s*#*\s*$/;
const RULE = /^ {0,3}([-*_])(\s*\1){2,}\s*$/;
const QUOTE = /^ {0,3}>\s?/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])(\s+|$)/;
const TABLE_EDGE = /^\s*\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)*\|?\s*$/;
const SAFE_LINK = /^(https?|mailto):/i; // others, such as javascript, stay text
const LONGEST_STYLED = 20000; // characters of a paragraph; a longer one is shown as it is

const INLINE = new RegExp(
  [
    "\\\\(?<escaped>[!-/:-@[-`{-~])",
    "(?<ticks>`+)(?<code>[^`]|[^`].*?[^`])\\k<ticks>(?!`)",
    "!?\\[(?<label>[^\\]]*)\\]\\(\\s*<?(?<target>[^\\s)>]+)>?(?:\\s+\"[^\"]*\")?\\s*\\)",
    "\\*\\*(?=\\S)(?<strong>.+?)(?<=\\S)\\*\\*",
    "(?<!\\w)__(?=\\S)(?<strong2>.+?)(?<=\\S)__(?!\\w)",
    "\\*(?=[^\\s*])(?<em>.+?)(?<=[^\\s*])\\*(?!\\*)",
    "(?<!\\w)_(?=[^\\s_])(?<em2>.+?)(?<=[^\\s_])_(?!\\w)",
    "~~(?=\\S)(?<del>.+?)(?<=\\S)~~",
    "(?<address>https?:\\/\\/[^\\s<>\"')\\]]*[^\\s<>\"')\\].,;:!?])",
  ].join("|"),
  "gs",
);

// A text that grows while it is shown: blocks that have not changed stay, with what the user has selected in them.
export class Markdown {
  constructor(place) {
    Object.assign(this, { place, sources: [] });
  }

  show(text) {
    const found = blocks(text.split("\n"));
    const same = found.findIndex(({ source }, at) => source !== this.sources[at]);
    const kept = same < 0 ? found.length : same;
    [...this.place.children].slice(kept).forEach((child) => child.remove());
    this.place.append(...found.slice(kept).map(({ make }) => make()));
    this.sources = found.map(({ source }) => source);
  }
}

// Of each block its source and how it is made.
function blocks(lines) {
  const found = [];
  for (let at = 0; at < lines.length; ) {
    if (!lines[at].trim()) {
      at += 1;
      continue;
    }
    const [end, make] = block(lines, at);
    found.push({ source: lines.slice(at, end).join("\n"), make });
    at = end;
  }
  return found;
}

// The block that begins here: the line behind it, and how it is made.
function block(lines, at) {
  const line = lines[at];
  let match;
  if ((match = FENCE.exec(line))) return fenced(lines, at, match);
  if ((match = HEADING.exec(line))) return [at + 1, () => node(`h${Math.min(6, match[1].length + 3)}`, inline(match[2]))];
  if (RULE.test(line)) return [at + 1, () => node("hr")];
  if (QUOTE.test(line)) return quote(lines, at);
  if (ITEM.test(line)) return list(lines, at);
  if (beginsTable(lines, at)) return table(lines, at);
  let end = at + 1;
  while (end < lines.length && lines[end].trim() && !interrupts(lines, end)) end += 1;
  return [end, () => node("p", inline(lines.slice(at, end).join("\n").trim()))];
}

function interrupts(lines, at) {
  const kinds = [FENCE, HEADING, RULE, QUOTE, ITEM];
  return kinds.some((kind) => kind.test(lines[at])) || beginsTable(lines, at);
}

function fenced(lines, at, [, fence, language]) {
  const closes = (line) => line.trim().startsWith(fence) && !line.trim().replaceAll(fence[0], "");
  const found = lines.findIndex((line, number) => number > at && closes(line));
  const end = found < 0 ? lines.length : found; // a block that is still coming has no end
  return [Math.min(end + 1, lines.length), () => codeBlock(lines.slice(at + 1, end).join("\n"), language)];
}

function quote(lines, at) {
  let end = at;
  while (end < lines.length && QUOTE.test(lines[end])) end += 1;
  return [end, () => node("blockquote", nodes(lines.slice(at, end).map((line) => line.replace(QUOTE, ""))))];
}

// Items of one kind with what is indented below them.
function list(lines, at) {
  const [, indent, mark] = ITEM.exec(lines[at]);
  const ordered = /\d/.test(mark);
  const items = [];
  let end = at;
  for (; end < lines.length; end += 1) {
    const line = lines[end];
    const item = ITEM.exec(line);
    const blankBefore = !lines[end - 1]?.trim();
    if (item && item[1].length < indent.length + 2 && !RULE.test(line)) {
      if (/\d/.test(item[2]) !== ordered) break;
      items.push([line.slice(item[0].length)]);
    } else if (/^(\s{2,}|\t)/.test(line) || !line.trim() || (!blankBefore && !interrupts(lines, end))) {
      items.at(-1).push(line.replace(/^(\t| {1,4})/, ""));
    } else break;
  }
  while (!lines[end - 1].trim()) end -= 1;
  return [end, () => makeList(ordered ? Number.parseInt(mark) : null, items)];
}

function makeList(start, items) {
  const made = node(start === null ? "ul" : "ol");
  if (start !== null && start !== 1) made.start = start;
  for (const item of items) {
    const [first, ...rest] = nodes(item);
    made.append(node("li", first?.tagName === "P" ? [...first.childNodes, ...rest] : nodes(item)));
  }
  return made;
}

function beginsTable(lines, at) {
  return lines[at].includes("|") && lines[at + 1]?.includes("|") && TABLE_EDGE.test(lines[at + 1]);
}

function table(lines, at) {
  let end = at + 2;
  while (end < lines.length && lines[end].includes("|")) end += 1;
  const cells = (line) => line.trim().replace(/^\||\|$/g, "").split(/(?<!\\)\|/).map((cell) => cell.trim().replaceAll("\\|", "|"));
  const row = (line, kind) => node("tr", cells(line).map((cell) => node(kind, inline(cell))));
  const make = () => {
    const whole = node("table", [
      node("thead", [row(lines[at], "th")]),
      node("tbody", lines.slice(at + 2, end).map((line) => row(line, "td"))),
    ]);
    return scrollable(node("div", [whole]), "table", "Table");
  };
  return [end, make];
}

function nodes(lines) {
  return blocks(lines).map(({ make }) => make());
}

function inline(text) {
  if (text.length > LONGEST_STYLED) return [text];
  const made = [];
  let end = 0;
  for (const match of text.matchAll(INLINE)) {
    made.push(text.slice(end, match.index), styled(match[0], match.groups));
    end = match.index + match[0].length;
  }
  return [...made, text.slice(end)];
}

function styled(source, { escaped, code, label, target, address, ...styles }) {
  if (escaped) return escaped;
  if (code) return node("code", [code]);
  if (address) return link(address, [address]);
  if (target) return SAFE_LINK.test(target) ? link(target, label ? inline(label) : [target]) : source;
  const [name, words] = Object.entries(styles).find(([kind, found]) => kind !== "ticks" && found);
  return node(name.replace("2", ""), inline(words));
}

function link(target, words) {
  const made = node("a", words);
  made.href = target;
  made.target = "_blank";
  made.rel = "noopener noreferrer";
  return made;
}
