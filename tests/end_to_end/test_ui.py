"""The page in a real Chromium, over a server whose pools are so small that chunks swap and drop."""

from __future__ import annotations

import json
import re

import pytest

from .browser import CHROMIUM, DESKTOP, PATIENCE_MS, PHONE, SUBJECTS, VisitedServer, launch
from .browser import opened as opened_as

pytestmark = pytest.mark.slow

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
axe = pytest.importorskip(
    "axe_playwright_python.sync_playwright", reason="axe-playwright-python is not installed"
)
expect = playwright.expect

if CHROMIUM is None:
    pytest.skip("there is no Chromium (Debian: chromium-headless-shell)", allow_module_level=True)

CONVERSATIONS = len(SUBJECTS)
SMALL = (
    "--gpu-kv-chunks",
    64,
    "--host-kv-chunks",
    48,
    "--chunk-tokens",
    16,
    "--max-model-len",
    640,
    "--max-num-seqs",
    4,
)
KEY, OTHER_KEY, NEW_KEY = "of-the-visitors", "of-the-other", "of-a-newcomer"
SIZES = pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])


class KeyedServer(VisitedServer):
    key = KEY


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with KeyedServer(
        tmp_path_factory.mktemp("state"), *SMALL, "--api-key", KEY, OTHER_KEY, NEW_KEY
    ) as running:
        running.begin(range(CONVERSATIONS))
        yield running


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as driver:
        chromium = launch(driver)
        yield chromium
        chromium.close()


def opened(browser, url, *, key=KEY, **options):
    return opened_as(browser, url, key=key, **options)


def message_box(page):
    return page.get_by_role("textbox", name="Message")


def show_list(page):
    """On a phone the list is behind a button."""
    button = page.get_by_role("button", name="Chats")
    if button.is_visible() and button.get_attribute("aria-expanded") == "false":
        button.click()


def ready(page):
    """The newest conversation has opened, which takes the focus."""
    expect(page.locator("article").first).to_be_visible()


def begin(page):
    """A conversation of the page's own."""
    ready(page)
    show_list(page)
    page.get_by_role("button", name="New chat").click()
    expect(page.locator("#title")).to_have_text("New conversation")


def longest_reply(page, tokens):
    page.get_by_text("Settings").click()
    page.get_by_role("spinbutton", name="Longest reply").fill(str(tokens))


def test_the_page_says_which_replica_it_is_and_whether_its_store_answers(server, browser):
    replica = server.ask("GET", "/health")["replica"]
    histories = {"store": "PostgreSQL", "reason": "no room"}

    def state(route):
        route.fulfill(json=route.fetch().json() | {"histories": histories})

    histories["healthy"] = False
    with opened(browser, server.url) as page:
        line = page.locator("#replica")
        expect(line).to_have_text(f"{replica} · SQLite")
        page.route("**/ui/state", state)
        for histories["healthy"], store_state in (
            (False, "PostgreSQL: no room"),
            (True, "PostgreSQL"),
        ):
            expect(line).to_have_text(f"{replica} · {store_state}")
        page.unroute_all(behavior="wait")


def test_chat_map_and_timeline_under_load(server, browser):
    with opened(browser, server.url) as page:
        options = page.get_by_role("listbox").get_by_role("option")
        expect(options).to_have_count(CONVERSATIONS)
        ready(page)
        page.get_by_role("link", name="Skip to the message").focus()
        page.get_by_role("listbox").focus()
        for key in ("End", "ArrowUp", "ArrowDown", "ArrowUp", "Enter"):
            page.keyboard.press(key)
        chosen = options.nth(CONVERSATIONS - 2).locator("span").text_content()
        expect(page.locator("#title")).to_have_text(chosen)
        message = message_box(page)
        expect(message).to_be_focused()
        longest_reply(page, 40)
        before = page.locator("article").count()
        assert before >= 2

        with server.load(title=chosen):
            message.fill("Where is the <img src=x> sea?")
            message.press("Enter")
            strip = page.locator(".strip")
            expect(strip).to_have_count(1)
            expect(page.locator("article")).to_have_count(before + 2)
            assert page.locator("article img").count() == 0
            sources = tokens_by_source(strip)
            assert sources["new"] > 0 and sum(sources.values()) > sources["new"]
            assert page.locator(".run").count() == len(sources)

            # until then it sends nothing
            expect(page.get_by_role("button", name="Send")).to_be_visible()
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
            expect(page.locator("[data-lane=gpu-host] .out .cell").first).to_be_attached()
            enough = "least => document.querySelector('#timeline canvas').dataset.points >= least"
            page.wait_for_function(enough, arg=10, timeout=3 * PATIENCE_MS)


def test_dropped_counts_evicted_chunks_as_the_metrics_do(server, browser):
    with server.load():
        while server.ask("GET", "/ui/state")["moves"]["drop"] == 0:
            pass
    tiers = ("gpu", "host", "disk")
    evicted = sum(
        server.metrics(
            *(f'pensieve:kv_evictions_total{{reason="dropped",tier="{tier}"}}' for tier in tiers)
        )
    )
    with opened(browser, server.url) as page:
        expect(page.locator("[data-dropped]")).to_have_text(f"{evicted:,.0f}")
        missing = sum(
            chunks["dropped"] for _, chunks in server.ask("GET", "/ui/state")["conversations"]
        )
        expect(page.locator("[data-tier=dropped]")).to_have_text(f"{missing:,}")
        assert 0 < missing <= evicted


def test_the_newest_conversation_opens_and_is_called_by_its_first_message(server, browser):
    newest = server.ask("GET", "/v1/conversations?limit=1")["data"][0]
    with opened(browser, server.url) as page:
        expect(page.locator("#title")).to_have_text(newest["title"])
        expect(page.locator("#id")).to_have_text(newest["id"])
        expect(page.get_by_role("option").first).to_contain_text(newest["title"])
        expect(page.locator("article.user").first).to_contain_text(newest["title"])
        chunks = page.get_by_role("figure", name="Chunks of this conversation")
        counts = server.ask("GET", f"/v1/conversations/{newest['id']}")["kv_chunks"]
        expect(chunks).to_contain_text(f"{sum(counts.values())} chunks of 16 tokens")
        expect(chunks.locator(".cells .dropped")).to_have_count(counts["dropped"])


def test_what_another_client_begins_is_listed_while_the_page_is_open(server, browser):
    with opened(browser, server.url) as page:
        expect(page.get_by_role("option")).to_have_count(CONVERSATIONS)
        messages = [{"role": "user", "content": "Do you know lighthouses?"}]
        server.post("/v1/chat/completions", messages=messages, max_tokens=4, conversation="lamp")
        expect(page.get_by_role("option").first).to_contain_text("Do you know lighthouses?")
        server.ask("DELETE", "/v1/conversations/lamp")


def test_a_server_that_was_restarted_has_no_negative_rates(server, browser):
    """Its counters begin at zero. The page gets no third answer, so it stands still then."""
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
        label = "Throughput in tokens/s: generated –, prompts –; highest 0"
        expect(page.locator("#timeline canvas").first).to_have_attribute("aria-label", label)


def tokens_by_source(strip):
    label = strip.get_attribute("aria-label").partition(": ")[2]
    return {words: int(count) for words, count in re.findall(r"(\w+) (\d+)", label)}


def test_the_map_is_read_and_used_by_keyboard(server, browser):
    with opened(browser, server.url, reduced_motion="reduce") as page:
        chunks = page.get_by_role("slider", name="Conversations on the map")
        expect(chunks).to_have_attribute("data-bars", str(CONVERSATIONS))
        ready(page)
        chunks.focus()
        page.keyboard.press("Home")
        page.keyboard.press("ArrowDown")
        expect(chunks).to_have_attribute("aria-valuenow", "2")
        label = chunks.get_attribute("aria-valuetext")
        match = re.fullmatch(
            r"(Tell me about [\w ]+\.): (\d+) on the device, (\d+) on the host, (\d+) on disk, "
            r"(\d+) dropped",
            label,
        )
        assert sum(map(int, match.groups()[1:])) > 2
        page.keyboard.press("Enter")
        expect(page.locator("#title")).to_have_text(match[1])


def test_a_message_written_while_a_conversation_opens_goes_to_that_one(server, browser):
    with opened(browser, server.url) as page:
        ready(page)
        held = []
        page.route("**/v1/conversations/visitor*", lambda route: held.append(route), times=1)
        with page.expect_request("**/v1/conversations/visitor*"):
            page.get_by_role("option").nth(1).click()
        name = page.get_by_role("option").nth(1).locator("span").text_content()
        message = message_box(page)
        message.fill("Hello again.")
        message.press("Enter")
        held[0].continue_()
        expect(page.locator(".strip")).to_have_count(1)
        expect(page.locator("#title")).to_have_text(name)
        assert page.locator("article").count() >= 4


@SIZES
def test_conversations_begin_fork_are_pinned_and_deleted(server, browser, size):
    with opened(browser, server.url, size=size) as page:
        begin(page)
        title = page.locator("#title")
        message_box(page).fill("Tell me of <b>tea</b> & more.")
        page.get_by_role("button", name="Send").click()
        expect(page.locator(".strip")).to_have_count(1)
        selected = page.locator("#conversations [aria-selected=true]")
        expect(title).to_have_text("Tell me of <b>tea</b> & more.")
        expect(selected).to_contain_text("Tell me of <b>tea</b> & more.")
        first = page.locator("#id").text_content()

        page.get_by_role("button", name="Pin").click()
        expect(selected).to_contain_text("pinned")
        page.get_by_role("button", name="Fork").click()
        expect(page.locator("#id")).not_to_have_text(first)
        expect(title).to_have_text("Tell me of <b>tea</b> & more.")
        expect(selected).to_contain_text("fork")
        expect(page.locator("article")).to_have_count(2)
        page.on("dialog", lambda dialog: dialog.accept())
        for end in range(2):
            page.get_by_role("button", name="Delete").click()
            expect(title).to_have_text("New conversation")
            expect(page.get_by_text("A server that remembers")).to_be_visible()
            if end == 0:
                show_list(page)
                page.get_by_text("Open by name").click()
                name = page.get_by_role("textbox", name="Name of the conversation")
                name.fill(first)
                name.press("Enter")
                expect(page.locator("#id")).to_have_text(first)
        show_list(page)
        expect(page.get_by_role("option")).to_have_count(CONVERSATIONS)


def test_a_reply_is_stopped_with_escape(server, browser):
    with opened(browser, server.url) as page:
        begin(page)
        message = message_box(page)
        message.fill("Count for as long as you can.")
        page.route(
            "**/chat/completions", lambda route: route.continue_(post_data=endless(route.request))
        )
        message.press("Enter")
        expect(page.locator("article.assistant p").first).not_to_be_empty()
        page.keyboard.press("Escape")
        expect(page.locator(".note")).to_contain_text("Stopped. This part is kept.")
        expect(page.get_by_role("button", name="Send")).to_be_visible()
        server.ask("DELETE", f"/v1/conversations/{page.locator('#id').text_content()}")


def endless(request):
    return json.dumps(json.loads(request.post_data) | {"ignore_eos": True})


@SIZES
def test_a_message_that_fails_stays_in_the_box_with_its_error(server, browser, size):
    """Refused before the reply, and broken off within it; the third time it is answered."""
    busy = {"error": {"message": "the queue is full", "type": "x", "param": None, "code": None}}
    piece = {"choices": [{"index": 0, "delta": {"content": "Half a rep"}, "finish_reason": None}]}
    broken = {"error": {"message": "the engine has ended"}}
    events = "".join(f"data: {json.dumps(event)}\n\n" for event in (piece, broken))
    with opened(browser, server.url, size=size) as page:
        ready(page)
        before = page.locator("article").count()
        message = message_box(page)
        error = page.get_by_role("alert")
        send = page.get_by_role("button", name="Send")

        page.route(
            "**/chat/completions", lambda route: route.fulfill(status=429, json=busy), times=1
        )
        message.fill("Tell me about bread.")
        send.click()
        expect(error).to_have_text("Not sent: the queue is full")
        expect(message).to_have_value("Tell me about bread.")
        expect(message).to_have_attribute("aria-invalid", "true")
        expect(page.locator("article")).to_have_count(before)

        page.route(
            "**/chat/completions",
            lambda route: route.fulfill(content_type="text/event-stream", body=events),
            times=1,
        )
        send.click()
        expect(error).to_have_text("Not sent: the engine has ended")
        expect(message).to_have_value("Tell me about bread.")
        expect(page.locator("article.lost")).to_have_count(2)
        expect(page.locator("article.lost").last).to_contain_text("Half a rep")

        send.click()
        expect(page.locator(".strip")).to_have_count(1)
        expect(message).to_have_value("")
        expect(error).to_be_hidden()
        assert all("429" in fault for fault in page.faults)
        page.faults.clear()


def test_a_phone_shows_the_chat_first_and_the_rest_behind_buttons(server, browser):
    with opened(browser, server.url, size=PHONE) as page:
        ready(page)
        for button, panel in (("Chats", "Conversations"), ("Cache", "Cache")):
            region = page.get_by_label(panel, exact=True)
            expect(region).to_be_hidden()
            page.get_by_role("button", name=button).click()
            expect(region).to_be_visible()
            page.keyboard.press("Escape")
            expect(region).to_be_hidden()
            expect(page.get_by_role("button", name=button)).to_be_focused()
        show_list(page)
        page.get_by_role("option").nth(2).click()
        expect(page.get_by_role("listbox")).to_be_hidden()
        assert page.evaluate("document.documentElement.scrollWidth") == PHONE[0]


@SIZES
def test_large_numbers_fit_their_boxes(server, browser, size):
    with opened(browser, server.url, size=size) as page:
        if size == PHONE:
            page.get_by_role("button", name="Cache").click()
        expect(page.get_by_text("Chunks on the move")).to_be_visible()
        cut = page.evaluate("""() => {
            for (const small of document.querySelectorAll(".box:not([data-box=dropped]) small"))
                small.textContent = "87,381 of 87,381";
            document.querySelector("[data-dropped]").textContent = "1,234,567";
            return [...document.querySelectorAll(".box")].filter((box) => {
                const inside = box.getBoundingClientRect();
                const range = document.createRange();
                range.selectNodeContents(box);
                return [...range.getClientRects()].some(
                    (part) => part.left < inside.left || part.right > inside.right);
            }).map((box) => box.textContent);
        }""")
        assert cut == []
        assert page.evaluate("document.documentElement.scrollWidth") == size[0]


@SIZES
def test_an_empty_page_says_what_to_do(server, browser, size):
    with opened(browser, server.url, key=NEW_KEY, size=size) as page:
        expect(page.get_by_text("Write a message, or try one of these")).to_be_visible()
        show_list(page)
        expect(page.get_by_text("No conversations yet")).to_be_visible()
        if size == PHONE:
            page.get_by_role("button", name="Cache").click()
        expect(page.get_by_text("Each conversation becomes a bar here")).to_be_visible()
        if size == PHONE:
            page.get_by_role("button", name="Cache").click()
        page.get_by_role("button", name="Tell me about tea.").click()
        expect(page.locator(".strip")).to_have_count(1)
        expect(page.locator("#title")).to_have_text("Tell me about tea.")
        expect(page.locator("#no-chunks")).to_have_attribute("hidden", "")
        page.on("dialog", lambda dialog: dialog.accept())
        page.get_by_role("button", name="Delete").click()
        expect(page.get_by_text("Write a message, or try one of these")).to_be_visible()


@SIZES
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_has_no_serious_accessibility_fault(server, browser, size, scheme):
    """By axe-core's rules, whose script is allowed past the page's policy. The page shows a reply
    with all elements, a thought, a call, an edited message, an error, and on a phone each panel."""
    words = (
        "# Tea\n\n* [one](https://example.org)\n\n```py\nx = 1\n```\n\n| a | b |\n|---|---|\n| 1 | "
        "`2` |\n\n> said"
    )
    usage = dict(
        prompt_tokens_details=dict(gpu=40, host=20, disk=9, recomputed=30, new=8),
        completion_tokens=9,
    )
    chunks = [
        {"choices": [{"index": 0, "delta": {"content": words}}]},
        {"choices": [], "usage": usage},
    ]
    events = "".join(f"data: {json.dumps(event)}\n\n" for event in chunks)
    function = {"name": "brew", "arguments": {"leaves": "green"}}
    call = {"id": "1", "type": "function", "function": function}
    stored = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Brew tea."},
        {"role": "assistant", "content": "", "reasoning_content": "Hm.", "tool_calls": [call]},
        {"role": "tool", "content": "It is ready.", "tool_call_id": "1"},
    ]

    def give(route):
        answer = route.fetch().json()
        route.fulfill(json=answer | {"messages": answer["messages"] + stored})

    options = dict(size=size, scheme=scheme, bypass_csp=True, reduced_motion="reduce")
    with opened(browser, server.url, show=False, **options) as page:
        page.route("**/v1/conversations/visitor*", give)
        page.route(
            "**/chat/completions",
            lambda route: route.fulfill(content_type="text/event-stream", body=events),
            times=1,
        )
        page.goto(f"{server.url}/ui")
        ready(page)
        stored += [
            {"role": "user", "content": "Show me everything."},
            {"role": "assistant", "content": words},
        ]
        message_box(page).fill("Show me everything.")
        page.get_by_role("button", name="Send").click()
        expect(page.locator(".strip")).to_have_count(1)
        expect(page.get_by_role("button", name="Send")).to_be_visible()
        for details in page.locator("article details").all():
            details.locator("summary").click()
        page.route(
            "**/chat/completions", lambda route: route.fulfill(status=503, body="{}"), times=1
        )
        message_box(page).fill("And now?")
        page.get_by_role("button", name="Send").click()
        expect(page.get_by_role("alert")).to_be_visible()
        expect(page.locator("[data-box=gpu] small")).to_contain_text("of 64")
        page.faults.clear()
        page.get_by_role("button", name="Edit").last.click()
        faults = serious(page)
        for button in ("Chats", "Cache") if size == PHONE else ():
            page.get_by_role("button", name=button).click()
            faults += serious(page)
        assert faults == []


def serious(page):
    violations = axe.Axe().run(page).response["violations"]
    return [
        (fault["id"], [node["html"] for node in fault["nodes"]])
        for fault in violations
        if fault["impact"] in ("serious", "critical")
    ]


def test_a_thousand_conversations(server, browser):
    """The map and the list of a server with 1,000: each state is drawn within a fraction of the
    time to the next."""
    names = [f"guest {number:04}" for number in range(1000)]
    state = server.ask("GET", "/ui/state")
    looks = []

    def give_state(route):
        looks.append(len(looks))
        moved = len(looks) * 7
        kv = [
            (name, (at + moved) % 9, (at * 3 + moved) % 7, at % 5, at % 4)
            for at, name in enumerate(names)
        ]
        route.fulfill(json=state | {"seconds": float(len(looks)), "conversations": kv})

    def give_page(route):
        after = re.search(r"after=guest%20(\d+)", route.request.url)
        first = int(after[1]) + 1 if after else 0
        shown = names[first : first + 100]
        data = [
            dict(id=name, title=f"I am {name}", tokens=321, parent=None, pinned_until=None)
            for name in shown
        ]
        route.fulfill(
            json={"data": data, "last_id": shown[-1], "has_more": first + 100 < len(names)}
        )

    def give_conversation(route):
        first = dict(
            id=names[0], title=f"I am {names[0]}", tokens=321, parent=None, pinned_until=None
        )
        route.fulfill(json=first | {"messages": []})

    with opened(browser, server.url, show=False) as page:
        page.route("**/ui/state", give_state)
        page.route("**/v1/conversations?*", give_page)
        page.route("**/v1/conversations/guest*", give_conversation)
        page.goto(f"{server.url}/ui")
        expect(page.locator("#map")).to_have_attribute("data-bars", "1000")
        options = page.get_by_role("option")
        for shown in range(100, 1001, 100):
            expect(options).to_have_count(shown)
            if shown < 1000:
                page.get_by_role("button", name="Show more").click()
        expect(page.get_by_role("button", name="Show more")).to_be_hidden()
        # it has opened, which takes the focus
        expect(page.locator("#title")).to_have_text("I am guest 0000")
        page.get_by_role("listbox").press("End")
        expect(page.locator("#conversations .active")).to_contain_text("guest 0999")
        expect(page.locator("#timeline canvas").first).to_have_attribute(
            "data-points", re.compile(r"[1-9]")
        )


def test_a_key_shows_its_owner_only_their_own(server, browser):
    messages = [{"role": "user", "content": "Hello!"}]
    server.post(
        "/v1/chat/completions",
        OTHER_KEY,
        messages=messages,
        max_tokens=4,
        conversation="of the other",
    )
    with opened(browser, server.url, key=None) as page:
        key = page.get_by_label("API key")
        expect(key).to_be_focused()
        key.fill(OTHER_KEY)
        key.press("Enter")
        expect(page.get_by_role("option")).to_have_count(1)
        expect(page.get_by_role("option")).to_contain_text("Hello!")
        expect(page.locator("#map")).to_have_attribute("data-bars", "1")
        ready(page)
        page.locator("#map").focus()
        expect(page.locator("#readout")).to_contain_text("Hello!: ")
        page.reload()
        expect(page.get_by_role("option")).to_have_count(1)
        assert page.faults and all("401" in fault for fault in page.faults)
        page.faults.clear()
