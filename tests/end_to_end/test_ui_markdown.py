"""Markdown as the page shows it, in a real Chromium under the page's policy."""

from __future__ import annotations

import pytest

from pensieve.runtime.http.page import HEADERS, UI_FILES

from .browser import CHROMIUM, launch

pytestmark = pytest.mark.slow

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")

if CHROMIUM is None:
    pytest.skip("there is no Chromium (Debian: chromium-headless-shell)", allow_module_level=True)

SHOW = r"""async (texts) => {
    const { Markdown } = await import("/ui/markdown.js");
    const place = document.createElement("div");
    const markdown = new Markdown(place);
    for (const text of texts) markdown.show(text);
    return place.innerHTML.replace(/>\n/g, ">");
}"""
WATCH = """
document.addEventListener("securitypolicyviolation", (event) => {
    window.violations.push(event.violatedDirective);
});
"""
LINK = '<a href="{0}" target="_blank" rel="noopener noreferrer">{1}</a>'
CODE_HEAD = (
    '<div class="code-block"><div><span>{0}</span>'
    '<button type="button" title="Copy code">Copy</button></div>'
)
WHOLE = """# Tea & *milk*

Boil **water**, then wait:

1. green: `70 °C`
2. black:
   - with milk
   - without

```python
def brew(leaves):
    return "<b>tea</b>"
```

| kind | minutes |
|:-----|--------:|
| green | 2 |
| black | 4 |

> Let it stand.

See https://example.org/tea."""


@pytest.fixture(scope="module")
def page():
    """Serves the page's files without a server."""
    with playwright.sync_playwright() as driver:
        chromium = launch(driver)
        page = chromium.new_context(permissions=["clipboard-read", "clipboard-write"]).new_page()

        def give(route):
            file = UI_FILES.get("/" + route.request.url.split("/", 3)[3])
            if route.request.url.endswith("/blank"):
                route.fulfill(
                    body="<!doctype html><body></body>",
                    content_type="text/html",
                    headers=dict(HEADERS),
                )
            else:
                route.fulfill(body=file.content, content_type=file.kind, headers=dict(HEADERS))

        page.route("**/*", give)
        page.add_init_script(WATCH)
        page.goto("http://localhost/blank")
        yield page
        chromium.close()


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("one\ntwo\n\nthree", "<p>one<br>two</p><p>three</p>"),
        ("## Tea ##", "<h5>Tea</h5>"),
        (
            "**bold** and *em*, ~~not~~",
            "<p><strong>bold</strong> and <em>em</em>, <del>not</del></p>",
        ),
        (
            "__bold__, _em_, snake_case_name, 2*3*4",
            "<p><strong>bold</strong>, <em>em</em>, snake_case_name, 2<em>3</em>4</p>",
        ),
        ("`a < b` and ``a ` b``", "<p><code>a &lt; b</code> and <code>a ` b</code></p>"),
        (r"\*no\* **yes *and* more**", "<p>*no* <strong>yes <em>and</em> more</strong></p>"),
        ("- a\n- b\n  - c\n- d", "<ul><li>a</li><li>b<ul><li>c</li></ul></li><li>d</li></ul>"),
        ("3. a\n4. b", '<ol start="3"><li>a</li><li>b</li></ol>'),
        ("* a\n\n* b\n\nend", "<ul><li><p>a</p></li><li><p>b</p></li></ul><p>end</p>"),
        ("> a\n> b", "<blockquote><p>a<br>b</p></blockquote>"),
        ("a\n\n---\n\nb", "<p>a</p><hr><p>b</p>"),
        (
            "[tea](https://example.org/a_b)",
            f"<p>{LINK.format('https://example.org/a_b', 'tea')}</p>",
        ),
        (
            "(https://example.org).",
            f"<p>({LINK.format('https://example.org', 'https://example.org')}).</p>",
        ),
        (
            "![a cup](https://example.org/cup.png)",
            f"<p>{LINK.format('https://example.org/cup.png', 'a cup')}</p>",
        ),
        ("[x](javascript:alert(1))", "<p>[x](javascript:alert(1))</p>"),
        ("[x](data:text/html,hi)", "<p>[x](data:text/html,hi)</p>"),
        ("![x](javascript:alert(1))", "<p>![x](javascript:alert(1))</p>"),
        ("<b onclick=alert(1)>\n\na", "<p>&lt;b onclick=alert(1)&gt;</p><p>a</p>"),
        (
            'see [tea]\n\n[tea]: https://example.org/?q="><script>',
            f"<p>see {LINK.format('https://example.org/?q=%22%3E%3Cscript%3E', 'tea')}</p>",
        ),
        ("- [x] a\n- [ ] b", "<ul><li>☑ a</li><li>☐ b</li></ul>"),
        ("<img src=x onerror=alert(1)>", "<p>&lt;img src=x onerror=alert(1)&gt;</p>"),
        ("**not closed and `not closed", "<p>**not closed and `not closed</p>"),
        (
            "```js\na < b\n\n# no head",
            CODE_HEAD.format("js")
            + '<pre class="text" tabindex="0" role="region" aria-label="Code in js">'
            "<code>a &lt; b\n\n# no head</code></pre></div>",
        ),
        (
            "| a | b |\n|---|---|\n| 1 \\| 2 | **3** |",
            '<div class="table" tabindex="0" role="region" aria-label="Table"><table>'
            "<thead><tr><th>a</th><th>b</th></tr></thead>"
            "<tbody><tr><td>1 | 2</td><td><strong>3</strong></td></tr></tbody></table></div>",
        ),
        ("", ""),
        ("-", "<ul><li></li></ul>"),
    ],
)
def test_how_it_is_shown(page, text, shown):
    page.evaluate("window.violations = []")
    assert page.evaluate(SHOW, [text]) == shown
    assert page.evaluate("window.violations") == []


def test_only_listed_elements_and_attributes_pass(page):
    """Behind the parser, which makes text of HTML, everything else is removed."""
    clean = """async (html) => {
        const { clean } = await import("/ui/markdown.js");
        const place = document.createElement("div");
        place.append(clean(html));
        return place.innerHTML;
    }"""
    for html, left in (
        ("<p onclick=x style=x id=x>a<script>b</script></p>", "<p>a</p>"),
        ("<svg><style><img src=x onerror=alert(1)></style></svg>", ""),
        ('<a href="javascript:alert(1)" name="x">a</a>', "<a>a</a>"),
        ("<img src=https://example.org/x.png><form><input></form>", ""),
    ):
        assert page.evaluate(clean, html) == left


def test_a_text_that_grows_ends_as_if_it_had_come_at_once(page):
    grown = [WHOLE[:end] for end in range(len(WHOLE) + 1)]
    assert page.evaluate(SHOW, grown) == page.evaluate(SHOW, [WHOLE])


def test_what_is_complete_is_not_made_again_when_more_comes(page):
    same = """async ([text, more]) => {
        const { Markdown } = await import("/ui/markdown.js");
        const place = document.createElement("div");
        const markdown = new Markdown(place);
        markdown.show(text);
        const before = [...place.children];
        markdown.show(text + more);
        return before.map((child, at) => child === place.children[at]);
    }"""
    assert page.evaluate(same, ["a\n\nb", " c\n\nd"]) == [True, False]


def test_no_text_takes_long(page):
    """Marks that open and never close."""
    for text in (
        "*" * 20_000,
        "**a " * 5_000,
        "[" * 20_000,
        "`" * 19_999,
        "_a" * 10_000,
        "> " * 500,
        "- " * 500,
    ):
        page.evaluate(SHOW, [text])


def test_code_is_copied(page):
    page.evaluate(
        """async (text) => {
        const { Markdown } = await import("/ui/markdown.js");
        document.body.replaceChildren(document.createElement("div"));
        new Markdown(document.body.firstChild).show(text);
    }""",
        WHOLE,
    )
    page.get_by_role("button", name="Copy").click()
    playwright.expect(page.get_by_role("button", name="Copied")).to_be_visible()
    assert (
        page.evaluate("() => navigator.clipboard.readText()")
        == 'def brew(leaves):\n    return "<b>tea</b>"'
    )
