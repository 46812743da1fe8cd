"""The page in a real Chromium, over a server whose pools are so small that chunks swap and drop."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from .server import HTTP, Server

pytestmark = pytest.mark.slow

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
expect = playwright.expect

CHROMIUM = next(filter(None, map(shutil.which, ("chromium-headless-shell", "chromium", "google-chrome"))), None)
if CHROMIUM is None:
    pytest.skip("there is no Chromium (Debian: chromium-headless-shell)", allow_module_level=True)

FIGURES = Path(os.environ.get("PENSIEVE_FIGURES", "")) if "PENSIEVE_FIGURES" in os.environ else None
PATIENCE_MS = 120_000
CONVERSATIONS = 24
SMALL = ("--gpu-kv-chunks", 64, "--host-kv-chunks", 48, "--max-model-len", 1024, "--max-num-seqs", 4)
KEY, OTHER_KEY = "of-the-visitors", "of-the-other"
WATCH = """
window.violations = [];
document.addEventListener("securitypolicyviolation", (event) => window.violations.push(event.violatedDirective));
"""


class KeyedServer(Server):
    """Asks with the visitors' key where no other is given."""

    def ask(self, method, path, key=KEY, **options):
        headers = {"authorization": f"Bearer {key}"}
        answer = HTTP.request(method, f"{self.url}{path}", headers=headers, timeout=120, **options)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def post(self, path, key=KEY, **body):
        return self.ask("POST", path, key, json={"model": "demo", **body})


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with KeyedServer(tmp_path_factory.mktemp("state"), *SMALL, "--api-key", KEY, OTHER_KEY) as running:
        talk(running, range(CONVERSATIONS))
        yield running


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-dev-shm-usage"])
        yield chromium
        chromium.close()


@contextmanager
def opened(browser, url, *, key=KEY, show=True, **options):
    """The page, which at its end has broken no rule of its policy and written no error."""
    context = browser.new_context(viewport={"width": 1360, "height": 820}, **options)
    context.set_default_timeout(PATIENCE_MS)
    expect.set_options(timeout=PATIENCE_MS)
    context.add_init_script(WATCH)
    if key is not None:
        context.add_init_script(f"sessionStorage.setItem('pensieve-api-key', {key!r})")
    page = context.new_page()
    faults = []
    page.on("console", lambda message: faults.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.faults = faults
    if show:
        page.goto(f"{url}/ui")
    yield page
    assert page.evaluate("window.violations") == []
    assert faults == []
    context.close()


def talk(server, numbers):
    """One turn of each of these conversations, which share nothing."""

    def turn(number):
        said = [{"role": "user", "content": f"I am visitor {number}. Tell me more of the sea in summer. " * 6}]
        body = dict(messages=said, max_tokens=16, conversation=f"visitor {number:02}", ignore_eos=True)
        server.post("/v1/chat/completions", **body)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(turn, numbers))


@contextmanager
def load(server):
    """Visitors come back, some often and others seldom, for as long as this is open."""
    ended = threading.Event()

    def visit(seed):
        draw = random.Random(seed)
        while not ended.is_set():
            name = f"visitor {int(CONVERSATIONS * draw.random() ** 3):02}"
            history = server.ask("GET", f"/v1/conversations/{name}")["messages"][:6]
            body = dict(messages=[*history, {"role": "user", "content": "And then?"}], max_tokens=16)
            server.post("/v1/chat/completions", conversation=name, **body)

    threads = [threading.Thread(target=visit, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        ended.set()
        for thread in threads:
            thread.join(120)


def figure(page, name):
    """A screenshot for the README where PENSIEVE_FIGURES names a folder, else none."""
    if FIGURES is not None:
        page.screenshot(path=FIGURES / f"ui-{name}.png")
        assert (FIGURES / f"ui-{name}.png").stat().st_size < 300_000


def test_chat_map_and_timeline_under_load(server, browser):
    with opened(browser, server.url) as page, load(server):
        options = page.get_by_role("listbox").get_by_role("option")
        expect(options).to_have_count(CONVERSATIONS)
        page.get_by_role("link", name="Skip to the message").focus()
        page.get_by_role("listbox").focus()
        for key in ("End", "ArrowUp", "ArrowDown", "ArrowUp", "Enter"):
            page.keyboard.press(key)
        chosen = options.nth(CONVERSATIONS - 2).locator("span").text_content()
        expect(page.locator("#title")).to_have_text(chosen)
        message = page.get_by_role("textbox", name="Message")
        expect(message).to_be_focused()
        page.get_by_role("spinbutton", name="Longest reply").fill("40")
        before = page.locator("article").count()
        assert before >= 2

        message.fill("Where is the <img src=x> sea?")
        message.press("Enter")
        strip = page.locator(".strip")
        expect(strip).to_have_count(1)
        expect(page.locator("article")).to_have_count(before + 2)
        assert page.locator("article img").count() == 0
        sources = tokens_by_source(strip)
        assert sources["new"] > 0 and sum(sources.values()) > sources["new"]
        assert page.locator(".run").count() == len(sources)

        message.fill("And the land?")
        message.press("Enter")
        expect(strip).to_have_count(2)
        assert sum(tokens_by_source(strip.last).values()) > sum(sources.values())

        for tier in ("gpu", "host", "dropped"):
            expect(page.locator(f"[data-tier={tier}]")).not_to_have_text("0")
        expect(page.locator("#map")).to_have_attribute("data-bars", str(CONVERSATIONS))
        charts = page.locator("#timeline canvas")
        expect(charts).to_have_count(4)
        for number in range(4):
            expect(charts.nth(number)).to_have_attribute("data-highest", re.compile(r"[1-9]"))
        enough = "least => document.querySelector('#timeline canvas').dataset.points >= least"
        page.wait_for_function(enough, arg=100 if FIGURES else 10, timeout=3 * PATIENCE_MS)
        figure(page, "chat")


def test_a_server_that_was_restarted_has_no_negative_rates(server, browser):
    """Its counters begin anew. The page gets no third answer: it stands still then."""
    with opened(browser, server.url, show=False) as page:
        states = []

        def state(route):
            states.append(route.fetch().json())
            if len(states) < 3:
                route.fulfill(json=states[-1] | {"generated": 1_000_000 if len(states) == 1 else 0})

        page.route("**/ui/state", state)
        page.goto(f"{server.url}/ui")
        while len(states) < 3:
            page.wait_for_timeout(50)
        assert page.locator("#timeline figcaption").first.text_content() == "Tokens/s: generated –, prompts –"


def tokens_by_source(strip):
    said = strip.get_attribute("aria-label").partition(": ")[2]
    return {words: int(count) for words, count in re.findall(r"(\w+) (\d+)", said)}


def test_the_map_is_read_and_used_by_keyboard(server, browser):
    with opened(browser, server.url, reduced_motion="reduce") as page:
        chunks = page.get_by_role("slider", name="Conversations on the map")
        expect(chunks).to_have_attribute("data-bars", str(CONVERSATIONS))
        chunks.focus()
        page.keyboard.press("Home")
        page.keyboard.press("ArrowDown")
        expect(chunks).to_have_attribute("aria-valuenow", "2")
        said = chunks.get_attribute("aria-valuetext")
        found = re.fullmatch(r"(visitor \d\d): (\d+) on the GPU, (\d+) on the host, (\d+) on disk, (\d+) dropped", said)
        assert sum(map(int, found.groups()[1:])) > 2
        page.keyboard.press("Enter")
        expect(page.locator("#title")).to_have_text(found[1])


def test_a_message_written_while_a_conversation_opens_goes_to_that_one(server, browser):
    with opened(browser, server.url) as page:
        held = []
        page.route("**/v1/conversations/visitor*", lambda route: held.append(route), times=1)
        with page.expect_request("**/v1/conversations/visitor*"):
            page.get_by_role("option").first.click()
        name = page.get_by_role("option").first.locator("span").text_content()
        message = page.get_by_role("textbox", name="Message")
        message.fill("Hello again.")
        message.press("Enter")
        held[0].continue_()
        expect(page.locator(".strip")).to_have_count(1)
        expect(page.locator("#title")).to_have_text(name)
        assert page.locator("article").count() >= 4


def test_conversations_begin_fork_are_pinned_and_deleted(server, browser):
    with opened(browser, server.url) as page:
        name = page.get_by_role("textbox", name="Open or begin")
        name.fill("tea / <b>&")
        name.press("Enter")
        title = page.locator("#title")
        expect(title).to_have_text("tea / <b>&")
        page.get_by_role("textbox", name="Message").fill("Tell me of tea.")
        page.get_by_role("button", name="Send").click()
        expect(page.locator(".strip")).to_have_count(1)
        selected = page.locator("#conversations [aria-selected=true]")
        expect(selected).to_contain_text("tea / <b>&")

        page.get_by_role("button", name="Pin").click()
        expect(selected).to_contain_text("pinned")
        page.get_by_role("button", name="Fork").click()
        expect(title).to_have_text(re.compile("^conv_"))
        expect(page.locator("article")).to_have_count(2)
        page.on("dialog", lambda dialog: dialog.accept())
        for end in range(2):
            page.get_by_role("button", name="Delete").click()
            expect(title).to_have_text("New conversation")
            if end == 0:
                name.fill("tea / <b>&")
                name.press("Enter")
                expect(title).to_have_text("tea / <b>&")
        expect(page.get_by_role("option")).to_have_count(CONVERSATIONS)


def test_a_reply_is_stopped_with_escape(server, browser):
    with opened(browser, server.url) as page:
        page.get_by_role("spinbutton", name="Longest reply").fill("900")
        message = page.get_by_role("textbox", name="Message")
        message.fill("Count for as long as you can.")
        page.route("**/chat/completions", lambda route: route.continue_(post_data=endless(route.request)))
        message.press("Enter")
        expect(page.locator("article.assistant p").first).not_to_be_empty()
        page.keyboard.press("Escape")
        expect(page.locator(".note")).to_contain_text("stopped")
        expect(page.get_by_role("button", name="Send")).to_be_enabled()
        server.ask("DELETE", f"/v1/conversations/{page.locator('#title').text_content()}")


def endless(request):
    return json.dumps(json.loads(request.post_data) | {"ignore_eos": True})


def test_a_thousand_conversations(server, browser):
    """The map and the list of a server with 1,000: each state is drawn within a fraction of the time to the next."""
    names = [f"guest {number:04}" for number in range(1000)]
    state = server.ask("GET", "/ui/state")
    looks = []

    def give_state(route):
        looks.append(len(looks))
        moved = len(looks) * 7
        kv = [(name, (at + moved) % 9, (at * 3 + moved) % 7, at % 5, at % 4) for at, name in enumerate(names)]
        route.fulfill(json=state | {"seconds": float(len(looks)), "conversations": kv})

    def give_page(route):
        after = re.search(r"after=guest%20(\d+)", route.request.url)
        first = int(after[1]) + 1 if after else 0
        shown = names[first : first + 100]
        data = [{"id": name, "tokens": 321, "pinned_until": None} for name in shown]
        route.fulfill(json={"data": data, "last_id": shown[-1], "has_more": first + 100 < len(names)})

    with opened(browser, server.url, show=False) as page:
        page.route("**/ui/state", give_state)
        page.route("**/v1/conversations?*", give_page)
        page.goto(f"{server.url}/ui")
        expect(page.locator("#map")).to_have_attribute("data-bars", "1000")
        options = page.get_by_role("option")
        for shown in range(100, 1001, 100):
            expect(options).to_have_count(shown)
            if shown < 1000:
                page.get_by_role("button", name="Show more").click()
        expect(page.get_by_role("button", name="Show more")).to_be_hidden()
        page.get_by_role("listbox").press("End")
        expect(page.locator("#conversations .active")).to_contain_text("guest 0999")
        expect(page.locator("#timeline canvas").first).to_have_attribute("data-points", re.compile(r"[1-9]"))
        figure(page, "thousand")


def test_a_key_shows_its_owner_only_their_own(server, browser):
    said = [{"role": "user", "content": "Hello!"}]
    server.post("/v1/chat/completions", OTHER_KEY, messages=said, max_tokens=4, conversation="of the other")
    with opened(browser, server.url, key=None) as page:
        key = page.get_by_label("API key")
        expect(key).to_be_focused()
        key.fill(OTHER_KEY)
        key.press("Enter")
        expect(page.get_by_role("option")).to_have_count(1)
        expect(page.get_by_role("option")).to_contain_text("of the other")
        expect(page.locator("#map")).to_have_attribute("data-bars", "1")
        page.locator("#map").focus()
        expect(page.locator("#readout")).to_contain_text("of the other: ")
        page.reload()
        expect(page.get_by_role("option")).to_have_count(1)
        assert page.faults and all("401" in fault for fault in page.faults)
        page.faults.clear()
