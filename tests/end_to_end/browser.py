"""A real Chromium for the page: contexts of a size and a colour scheme, and visitors that keep the
server busy."""

from __future__ import annotations

import random
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from .server import HTTP, Server

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium-headless-shell", "chromium", "google-chrome"))), None
)
DESKTOP, PHONE = (1280, 800), (390, 844)
SUBJECTS = (
    *(
        "tea",
        "whales",
        "rice",
        "bread",
        "the sea",
        "bees",
        "the Moon",
        "gardens",
        "trains",
        "foxes",
        "coffee",
        "rivers",
    ),
    *(
        "music",
        "snow",
        "books",
        "stars",
        "cats",
        "cheese",
        "bicycles",
        "maps",
        "horses",
        "rain",
        "chess",
        "lemons",
    ),
)
QUESTIONS = ("Tell me more.", "Why is that?", "What else do you know?", "Thank you! And then?")

PATIENCE_MS = 120_000
WATCH = """
window.violations = [];
document.addEventListener("securitypolicyviolation", (event) => {
    window.violations.push(event.violatedDirective);
});
"""


def launch(driver):
    return driver.chromium.launch(
        executable_path=CHROMIUM, args=["--no-sandbox", "--disable-dev-shm-usage"]
    )


def context_of(browser, size, scheme="light", **options):
    width, height = size
    phone = size == PHONE
    options |= dict(
        viewport={"width": width, "height": height},
        color_scheme=scheme,
        has_touch=phone,
        is_mobile=phone,
    )
    return browser.new_context(**options)


@contextmanager
def opened(browser, url, *, key=None, show=True, size=DESKTOP, **options):
    """The page, which at its end has broken no rule of its policy and written no error."""
    from playwright.sync_api import expect  # of the extra `test`; the other functions need none

    context = context_of(browser, size, **options)
    context.set_default_timeout(PATIENCE_MS)
    expect.set_options(timeout=PATIENCE_MS)
    context.add_init_script(WATCH)
    if key is not None:
        context.add_init_script(f"sessionStorage.setItem('pensieve-api-key', {key!r})")
    page = context.new_page()
    faults = []
    page.on(
        "console", lambda message: faults.append(message.text) if message.type == "error" else None
    )
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.faults = faults
    if show:
        page.goto(f"{url}/ui")
    yield page
    assert page.evaluate("window.violations") == []
    assert faults == []
    context.close()


class VisitedServer(Server):
    """A server with visitors that chat, each about another subject. `key`: the visitors' API key,
    None: none."""

    key = None

    def ask(self, method, path, key=None, **options):
        key = key or self.key
        headers = {"authorization": f"Bearer {key}"} if key is not None else {}
        answer = HTTP.request(method, f"{self.url}{path}", headers=headers, timeout=120, **options)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def post(self, path, key=None, **body):
        return self.ask("POST", path, key, json={"model": "demo", **body})

    def begin(self, numbers):
        """One turn of each of these visitors."""
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(self.visit, numbers))

    def visit(self, number, *history, text=None):
        message = {"role": "user", "content": text or f"Tell me about {SUBJECTS[number]}."}
        body = dict(messages=[*history, message], max_tokens=40, temperature=0.2)
        self.post("/v1/chat/completions", conversation=f"visitor {number:02}", **body)

    @contextmanager
    def load(self, at_once=3, title=None):
        """Visitors come back, some often and others seldom, for as long as this is open. The
        conversation with this title is left alone."""
        ended = threading.Event()

        def come_back(seed):
            draw = random.Random(seed)
            while not ended.is_set():
                number = int(len(SUBJECTS) * draw.random() ** 2)
                conversation = self.ask("GET", f"/v1/conversations/visitor {number:02}")
                if conversation["title"] != title:
                    history = conversation["messages"][:6]
                    self.visit(number, *history, text=draw.choice(QUESTIONS))

        with ThreadPoolExecutor(at_once) as pool:
            visits = [pool.submit(come_back, seed) for seed in range(at_once)]
            try:
                yield
            finally:
                ended.set()
        for visit in visits:
            visit.result()
