"""The page as a chat: a reply that is stopped, sent again or edited, addresses, thoughts, calls.

The model says what its script tells it, from the KV pool: a reply is right only if the KV is. Two
processes serve the page and its calls.
"""

from __future__ import annotations

import json
import re

import pytest

from tests.scripted_model import OTHERWISE, scripted_server, tool_call

from .browser import CHROMIUM, DESKTOP, PHONE, launch, opened
from .server import HTTP
from .test_server import wait_for

pytestmark = pytest.mark.slow

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
expect = playwright.expect

if CHROMIUM is None:
    pytest.skip("there is no Chromium (Debian: chromium-headless-shell)", allow_module_level=True)

TIDES = "The tide rises twice a day. " * 12
SCRIPT = {
    "tides": TIDES.strip(),
    "gulls": "Gulls eat **everything**.",
    "terns": "Terns eat fish.",
    "puzzle": "<think>\nIt may be a boat.\n</think>\n\nA boat.",
    "weather": "I look. " + tool_call("weather", city="Oslo"),
    "rain": "Take a coat.",
}
HELLO = "Hello! " + "I sail a boat. " * 20 + "And you?"  # some chunks of KV
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
SIZES = pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    # a reply that never ends has room for minutes
    small = ("--max-model-len", 131072, "--gpu-kv-chunks", 8192, "--api-server-count", 2)
    with scripted_server(tmp_path_factory.mktemp("scripted"), SCRIPT, *small) as running:
        yield running


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as driver:
        chromium = launch(driver)
        yield chromium
        chromium.close()


def say(page, words):
    box = page.get_by_role("textbox", name="Message", exact=True)
    box.fill(words)
    box.press("Enter")


def answered(page, count):
    """So many replies of this page are whole."""
    expect(page.locator(".strip")).to_have_count(count)
    expect(page.get_by_role("button", name="Send")).to_be_visible()


def new_chat(page):
    if page.get_by_role("button", name="Chats").is_visible():
        page.get_by_role("button", name="Chats").click()
    page.get_by_role("button", name="New chat").click()
    expect(page.locator("article")).to_have_count(0)


def chat_id(page):
    return page.locator("#id").text_content()


def stored(server, conversation):
    answer = HTTP.get(f"{server.url}/v1/conversations/{conversation}").json()
    assert not answer["in_flight"]
    return [(message["role"], message["content"]) for message in answer["messages"]]


def never_ends(page):
    """The next reply goes on behind the script's end, with tokens that have no text."""

    def ignore_end(route):
        body = json.loads(route.request.post_data) | {"ignore_eos": True}
        route.continue_(post_data=json.dumps(body))

    page.route("**/chat/completions", ignore_end, times=1)


def stop_reply(page, words):
    never_ends(page)
    before = page.locator("article.assistant").count()
    say(page, words)
    expect(page.locator("article.assistant").nth(before).locator(".words")).to_contain_text("tide")
    page.keyboard.press("Escape")
    expect(page.locator(".note")).to_contain_text("This part is kept")
    expect(page.get_by_role("button", name="Send")).to_be_visible()


@SIZES
def test_a_stopped_reply_and_its_turn_are_kept(server, browser, size):
    with opened(browser, server.url, size=size) as page:
        new_chat(page)
        stop_reply(page, "Tell me about tides.")
        name = chat_id(page)
        (_, part) = stored(server, name)[1]
        shown = page.locator("article.assistant .words")
        expect(shown).to_have_text(part.strip())
        assert TIDES.startswith(part) and "tide" in part

        page.reload()
        expect(shown).to_have_text(part.strip())
        say(page, "And gulls?")
        answered(page, 1)
        assert [content for _, content in stored(server, name)] == [
            "Tell me about tides.",
            part,
            "And gulls?",
            SCRIPT["gulls"],
        ]
        label = page.locator(".strip").get_attribute("aria-label")
        cached, new = (int(re.search(rf"{tier} (\d+)", label)[1]) for tier in ("device", "new"))
        assert cached > new

        # the reply that was cut is the model's own: sent again it comes whole
        page.locator("article.user").first.get_by_role("button", name="Edit").click()
        page.get_by_role("textbox", name="Edit message").press("Enter")
        answered(page, 1)
        assert stored(server, name) == [
            ("user", "Tell me about tides."),
            ("assistant", SCRIPT["tides"]),
        ]


def test_a_reply_that_is_left_by_a_reload_is_kept_too(server, browser):
    with opened(browser, server.url) as page:
        new_chat(page)
        never_ends(page)
        say(page, "Tell me about tides.")
        expect(page.locator("article.assistant .words")).to_contain_text("tide")
        name = chat_id(page)
        page.reload()
        shown = page.locator("article.assistant .words")
        expect(shown).to_contain_text("tide")
        expect(page.locator(".note")).to_have_count(0)
        assert chat_id(page) == name
        (_, part) = stored(server, name)[1]
        expect(shown).to_have_text(part.strip())


def test_a_turn_that_is_stopped_before_its_reply_goes_back_into_the_box(server, browser):
    """The server is not asked at all: the request is held."""
    with opened(browser, server.url) as page:
        new_chat(page)
        held = []
        page.route("**/chat/completions", lambda route: held.append(route), times=1)
        with page.expect_request("**/chat/completions"):
            say(page, "Tell me about gulls.")
        page.get_by_role("button", name="Stop").click()
        box = page.get_by_role("textbox", name="Message", exact=True)
        expect(box).to_have_value("Tell me about gulls.")
        expect(page.locator("article")).to_have_count(0)
        assert stored(server, chat_id(page)) == []
        box.press("Enter")
        answered(page, 1)
        assert len(stored(server, chat_id(page))) == 2


@SIZES
def test_a_reply_is_made_again(server, browser, size):
    with opened(browser, server.url, size=size) as page:
        new_chat(page)
        say(page, "Hello!")
        answered(page, 1)
        expect(page.get_by_role("button", name="Regenerate")).to_have_count(1)
        stop_reply(page, "Tell me about tides.")
        expect(page.get_by_role("button", name="Regenerate")).to_have_count(1)
        name = chat_id(page)
        page.get_by_role("button", name="Regenerate").click()
        answered(page, 2)
        expect(page.locator("article")).to_have_count(4)
        expect(page.locator(".note")).to_have_count(0)
        assert stored(server, name)[1:] == [
            ("assistant", OTHERWISE),
            ("user", "Tell me about tides."),
            ("assistant", SCRIPT["tides"]),
        ]
        # refused: the old reply stays
        page.route(
            "**/chat/completions", lambda route: route.fulfill(status=429, body="{}"), times=1
        )
        page.get_by_role("button", name="Regenerate").click()
        expect(page.get_by_role("alert")).to_contain_text("Not sent")
        expect(page.locator("article")).to_have_count(4)
        expect(page.locator("article.assistant").last).to_contain_text("twice a day")
        page.faults.clear()


@SIZES
def test_a_message_is_edited_and_sent_again(server, browser, size):
    with opened(browser, server.url, size=size) as page:
        new_chat(page)
        for count, words in enumerate((HELLO, "Tell me about gulls.", "Thanks!"), 1):
            say(page, words)
            answered(page, count)
        name = chat_id(page)
        second = page.locator("article.user").nth(1)
        second.get_by_role("button", name="Edit").click()
        field = page.get_by_role("textbox", name="Edit message")
        expect(field).to_be_focused()
        expect(field).to_have_value("Tell me about gulls.")
        field.press("Escape")
        expect(field).to_have_count(0)
        expect(second.get_by_role("button", name="Edit")).to_be_focused()

        page.keyboard.press("Enter")
        field.fill("Tell me about terns.")
        field.press("Enter")
        answered(page, 2)
        assert stored(server, name) == [
            ("user", HELLO),
            ("assistant", OTHERWISE),
            ("user", "Tell me about terns."),
            ("assistant", SCRIPT["terns"]),
        ]
        expect(page.locator("article")).to_have_count(4)
        label = page.locator(".strip").last.get_attribute("aria-label")
        assert int(re.search(r"device (\d+)", label)[1]) >= 32


def test_each_chat_has_its_address(server, browser):
    with opened(browser, server.url) as page:
        names = []
        for words in ("Hello, gulls & terns!", "Hello, tides?"):
            new_chat(page)
            expect(page).to_have_url(re.compile(r"\?c=$"))
            say(page, words)
            answered(page, 1)
            names.append(chat_id(page))
            expect(page).to_have_url(re.compile(rf"\?c={names[-1]}$"))
            expect(page).to_have_title(f"{words} · Pensieve")
        for _ in range(2):  # past the empty chat between them
            page.go_back()
        expect(page.locator("#id")).to_have_text(names[0])
        expect(page).to_have_title("Hello, gulls & terns! · Pensieve")
        page.reload()
        expect(page.locator("#id")).to_have_text(names[0])
        page.go_forward()
        expect(page.locator("article")).to_have_count(0)
        page.reload()
        expect(page.get_by_text("Write a message, or try one of these")).to_be_visible()
        page.go_forward()
        expect(page.locator("#id")).to_have_text(names[1])

        page.goto(f"{server.url}/ui?c=nothing%20here")
        expect(page.get_by_role("alert")).to_have_text("There is no chat nothing here.")
        assert page.faults and all("404" in fault for fault in page.faults)
        page.faults.clear()


def test_the_settings_of_a_reply_stay(server, browser):
    with opened(browser, server.url) as page:
        page.get_by_text("Settings").click()
        page.get_by_role("spinbutton", name="Temperature").fill("1.1")
        page.get_by_role("spinbutton", name="Longest reply").fill("5")
        page.get_by_role("spinbutton", name="Longest reply").press("Tab")
        page.reload()
        new_chat(page)
        with page.expect_request("**/chat/completions") as request:
            say(page, "Tell me about tides.")
        body = json.loads(request.value.post_data)
        assert (body["temperature"], body["max_tokens"]) == (1.1, 5)
        answered(page, 1)


def test_a_message_is_copied_as_it_was_written(server, browser):
    permissions = ["clipboard-read", "clipboard-write"]
    with opened(browser, server.url, permissions=permissions) as page:
        new_chat(page)
        say(page, "Tell me about gulls.")
        answered(page, 1)
        expect(page.locator("article.assistant strong")).to_have_text("everything")
        page.locator("article.assistant").get_by_role("button", name="Copy").click()
        expect(page.get_by_role("button", name="Copied")).to_be_visible()
        assert page.evaluate("() => navigator.clipboard.readText()") == SCRIPT["gulls"]


def test_thoughts_are_folded(server, browser):
    with opened(browser, server.url) as page:
        new_chat(page)
        say(page, "I have a puzzle.")
        answered(page, 1)
        for _ in range(2):
            reply = page.locator("article.assistant")
            expect(reply.locator(".words")).to_have_text("A boat.")
            thought = reply.get_by_text("It may be a boat.")
            expect(thought).to_be_hidden()
            reply.get_by_text("Thoughts").click()
            expect(thought).to_be_visible()
            page.reload()  # the stored one


def test_calls_of_tools_are_shown_and_sent_back(server, browser):
    """Another client's conversation, whose last reply is made again."""
    url = f"{server.url}/v1/chat/completions"
    body = {"model": "scripted", "conversation": "coat", "tools": [TOOL]}
    messages = [{"role": "user", "content": "How is the weather?"}]
    call = HTTP.post(url, json={**body, "messages": messages}).json()["choices"][0]["message"]
    result = {
        "role": "tool",
        "tool_call_id": call["tool_calls"][0]["id"],
        "content": "rain",
    }
    HTTP.post(url, json={**body, "history": "server", "messages": [result]}).raise_for_status()
    with opened(browser, server.url, show=False) as page:
        page.goto(f"{server.url}/ui?c=coat")
        shown = page.locator("article")
        expect(shown).to_have_count(4)
        page.get_by_text("Call of weather").click()
        expect(shown.nth(1).get_by_label("Code in json")).to_have_text('{\n  "city": "Oslo"\n}')
        page.get_by_text("Result", exact=True).click()
        expect(shown.nth(2)).to_contain_text("rain")
        page.get_by_role("button", name="Regenerate").click()
        answered(page, 1)
        roles = [role for role, _ in stored(server, "coat")]
        assert roles == ["user", "assistant", "tool", "assistant"]
        expect(page.locator("article").last).to_contain_text("Take a coat.")


def test_a_turn_of_another_client_is_shown_when_it_ends(server, browser):
    body = {
        "model": "scripted",
        "conversation": "shared",
        "messages": [{"role": "user", "content": "Tell me about tides."}],
    }
    url = f"{server.url}/v1/chat/completions"
    HTTP.post(url, json=body).raise_for_status()
    more = {"history": "server", "stream": True, "ignore_eos": True, "on_disconnect": "store"}
    with opened(browser, server.url, show=False) as page:
        with HTTP.stream("POST", url, json=body | more) as reply:
            lines = reply.iter_lines()
            next(line for line in lines if '"delta":{"content":' in line)
            page.goto(f"{server.url}/ui?c=shared")
            expect(page.locator(".note")).to_contain_text("A reply to another message is coming")
            expect(page.locator("article")).to_have_count(2)
        expect(page.locator("article")).to_have_count(4)
        expect(page.locator(".note")).to_have_count(0)

        # a turn between two of this page: what is shown is not what is stored
        say(page, "Hello!")
        answered(page, 1)
        HTTP.post(url, json=body | {"history": "server"}).raise_for_status()
        say(page, "Hello!")
        answered(page, 2)
        page.get_by_role("button", name="Regenerate").click()
        expect(page.get_by_role("alert")).to_contain_text("another client has changed this chat")
        expect(page.locator("article")).to_have_count(10)


def test_the_end_of_another_clients_turn_leaves_a_newer_reply_as_it_is(server, browser):
    question = {"role": "user", "content": "Tell me about tides."}
    body = {"model": "scripted", "conversation": "overtaken", "messages": [question]}
    url = f"{server.url}/v1/chat/completions"
    HTTP.post(url, json=body).raise_for_status()
    endless = {"stream": True, "ignore_eos": True, "on_disconnect": "store"}
    with opened(browser, server.url, show=False) as page:
        with HTTP.stream("POST", url, json=body | endless) as other:
            lines = other.iter_lines()
            next(line for line in lines if '"delta":{"content":' in line)
            page.goto(f"{server.url}/ui?c=overtaken")
            expect(page.locator(".note")).to_contain_text("A reply to another message is coming")
            say(page, "Hello!")
            answered(page, 1)
            expect(page.locator(".strip")).to_have_count(1)
        path = f"{server.url}/v1/conversations/overtaken"
        wait_for(lambda: not HTTP.get(path).json()["in_flight"])
        page.wait_for_timeout(1000)  # a page that still follows would have looked again
        expect(page.locator(".strip")).to_have_count(1)
        expect(page.locator(".note")).to_have_count(0)


def test_a_server_without_a_gpu_shows_none(server, browser):
    with opened(browser, server.url) as page:
        name = HTTP.get(f"{server.url}/ui/state").json()["tier_names"]["gpu"]
        expect(page.locator("#map")).not_to_have_attribute("aria-valuetext", "none")
        expect(page.locator("#legend")).to_contain_text(name)
        assert "GPU" not in page.locator("body").inner_text()
        assert page.locator("[aria-label*=GPU]").count() == 0
