// Elements that the page makes in several places: one with children, one that scrolls, a block of code with a copy button.

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

export function codeBlock(code, language) {
  const copy = node("button", ["Copy"]);
  copy.type = "button";
  copy.addEventListener("click", async () => {
    copy.textContent = (await copied(code, text)) ? "Copied" : "Not copied";
    setTimeout(() => (copy.textContent = "Copy"), 2000);
  });
  const text = node("code", [code]);
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
