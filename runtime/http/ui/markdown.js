// Shows a model's Markdown. marked parses it, and DOMPurify lets only these elements through. HTML in it is shown as text.

import "./vendor/dompurify/purify.min.js"; // defines globalThis.DOMPurify
import { Marked } from "./vendor/marked/marked.esm.js";
import { codeBlock, node, scrollable } from "./nodes.js";

const SAFE_LINK = /^(https?|mailto):/i; // others, such as javascript, stay text
const ESCAPES = { "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;" };
const CLEAN = {
  ALLOWED_TAGS: [
    ...["p", "h4", "h5", "h6", "ul", "ol", "li", "blockquote", "hr", "br", "pre", "code", "a", "strong", "em", "del"],
    ...["table", "thead", "tbody", "tr", "th", "td"],
  ],
  ALLOWED_ATTR: ["align", "class", "href", "start"],
  ADD_URI_SAFE_ATTR: ["align", "class", "start"], // all others need this form
  ALLOWED_URI_REGEXP: SAFE_LINK,
  ALLOW_ARIA_ATTR: false,
  ALLOW_DATA_ATTR: false,
  RETURN_DOM_FRAGMENT: true,
};

const marked = new Marked({
  gfm: true,
  breaks: true,
  renderer: {
    heading({ tokens, depth }) {
      const level = Math.min(6, depth + 3); // the page has its own headings above
      return `<h${level}>${this.parser.parseInline(tokens)}</h${level}>`;
    },
    html({ raw, block }) {
      return block ? `<p>${escaped(raw.trim())}</p>` : escaped(raw);
    },
    link({ raw, href }) {
      return SAFE_LINK.test(href) ? false : escaped(raw); // false: as marked does it
    },
    // The page loads nothing from other servers.
    image({ raw, href, tokens }) {
      if (!SAFE_LINK.test(href)) return escaped(raw);
      return `<a href="${escaped(href)}">${this.parser.parseInline(tokens) || escaped(href)}</a>`;
    },
    checkbox({ checked }) {
      return checked ? "☑ " : "☐ ";
    },
  },
});

// A text that grows while it is shown: blocks that have not changed stay, with what the user has selected in them.
export class Markdown {
  constructor(place) {
    Object.assign(this, { place, blocks: [], definitions: "" });
  }

  show(text) {
    const tokens = marked.lexer(text);
    const definitions = JSON.stringify(tokens.links); // a block may refer to one that comes later
    let kept = 0;
    if (definitions === this.definitions) {
      while (kept < this.blocks.length && this.blocks[kept].source === tokens[kept]?.raw) kept += 1;
    }
    this.definitions = definitions;
    for (const { elements } of this.blocks.splice(kept)) elements.forEach((element) => element.remove());
    for (const token of tokens.slice(kept)) {
      const elements = block(token);
      this.place.append(...elements);
      this.blocks.push({ source: token.raw, elements });
    }
  }
}

export function clean(html) {
  return DOMPurify.sanitize(html, CLEAN);
}

// The elements of one block: none of a blank line.
function block(token) {
  const fragment = clean(marked.parser([token]));
  for (const link of fragment.querySelectorAll("a")) {
    link.target = "_blank";
    link.rel = "noopener noreferrer";
  }
  for (const code of fragment.querySelectorAll("pre > code")) {
    const language = code.className.replace("language-", "");
    code.parentElement.replaceWith(codeBlock(code.textContent.replace(/\n$/, ""), language));
  }
  for (const table of fragment.querySelectorAll("table")) {
    const place = scrollable(node("div"), "table", "Table");
    table.replaceWith(place);
    place.append(table);
  }
  return [...fragment.children];
}

function escaped(text) {
  return text.replace(/[&<>"]/g, (sign) => ESCAPES[sign]);
}
