// Elements that the page makes in several places: one with children, one that scrolls, a copy button, a block of code.

export function node(name, children = []) {
  const made = document.createElement(name);
  made.append(...children);
  return made;
}

// What is wider than its place scrolls by itself, by keyboard too.
export function scrollable(element, className, label) {
  element.className = className;
  element.tabIndex = 0;
  element.setAttribute("role", "region");
  element.setAttribute("aria-label", label);
  return element;
}

// `description`: in words. `text()`: what is copied; `element` shows it.
export function copyButton(description, text, element) {
  const copy = node("button", ["Copy"]);
  copy.type = "button";
  copy.title = description;
  copy.addEventListener("click", async () => {
    copy.textContent = (await copied(text(), element)) ? "Copied" : "Not copied";
    setTimeout(() => (copy.textContent = "Copy"), 2000);
  });
  return copy;
}

export function codeBlock(code, language) {
  const text = node("code", [code]);
  const copy = copyButton("Copy code", () => code, text);
  const bar = node("div", [node("span", [language || "code"]), copy]);
  const block = node("div", [bar, scrollable(node("pre", [text]), "text", `Code${language && ` in ${language}`}`)]);
  block.className = "code-block";
  return block;
}

// Browsers have a clipboard on secure pages only. Elsewhere the text is selected and copied as a user would do it.
async function copied(code, element) {
  try {
    await navigator.clipboard.writeText(code);
    return true;
  } catch {
    getSelection().selectAllChildren(element);
    return document.execCommand("copy");
  }
}
