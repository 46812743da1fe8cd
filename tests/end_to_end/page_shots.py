"""Makes the page's pictures for the documentation: python -m tests.end_to_end.page_shots
docs/figures

Screenshots of a desktop and a phone, light and dark, and an animation of a user who returns. The
demo model writes the replies in them. It needs Chromium and the extras `test` and `bench`.
"""

from __future__ import annotations

import argparse
import io
import tempfile
from itertools import product
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont
from playwright.sync_api import sync_playwright

from .browser import DESKTOP, PHONE, SUBJECTS, VisitedServer, context_of, launch

TIERS = ("--gpu-kv-chunks", 64, "--host-kv-chunks", 56, "--disk-kv-chunks", 64)
SMALL = (*TIERS, "--chunk-tokens", 16, "--max-model-len", 640, "--max-num-seqs", 4)
SIZES = {"desktop": DESKTOP, "phone": PHONE}
CHATS = {
    ("desktop", "light"): (
        "Tell me about coffee.",
        "How do I make it?",
        "Write a short poem about coffee.",
    ),
    ("desktop", "dark"): (
        "Tell me about whales.",
        "Tell me more.",
        "Write a short poem about the sea.",
    ),
    ("phone", "light"): ("Write a short poem about rain.", "Thank you!"),
    ("phone", "dark"): ("Tell me a story about a fox.", "Thank you!"),
}
FRAME_MS = 250
LAST_FRAME_MS = 4000
WIDTH, CAPTION = 900, 44  # pixels of the animation
STORY = {
    "arrive": "A user asks about the Sun. What the model computes is kept on the GPU, as chunks.",
    "away": (
        "The user leaves, and others need the room: the chunks move to the host, to disk, and out."
    ),
    "back": (
        "The user comes back: the chunks that are near are loaded and used again, the rest is "
        "computed."
    ),
}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--animation-only", action="store_true")
    options = parser.parse_args()
    folder = options.folder
    with sync_playwright() as driver:
        browser = launch(driver)
        if not options.animation_only:
            with VisitedServer(tempfile.mkdtemp(), *SMALL) as server:
                shoot_states(browser, server, folder)
        loaded = False
        while not loaded:
            with VisitedServer(tempfile.mkdtemp(), *SMALL) as server:
                loaded = animate(browser, server, folder / "page-returning-user.webp")
        browser.close()


def shoot_states(browser, server, folder):
    """Empty, in a chat, under load, and with a message that could not be sent."""
    pages = {}
    for name, scheme in product(SIZES, ("light", "dark")):
        scale = 2 if name == "phone" else 1
        context = context_of(
            browser, SIZES[name], scheme, device_scale_factor=scale, reduced_motion="no-preference"
        )
        page = pages[name, scheme] = context.new_page()
        page.goto(f"{server.url}/ui")
        page.locator("#timeline canvas:not([data-points='0'])").first.wait_for(state="attached")

    def shoot(state, showing="body"):
        for (name, scheme), page in pages.items():
            page.locator(showing).wait_for(state="attached")
            save(page.screenshot(), folder / f"page-{state}-{name}-{scheme}.png")

    shoot("empty")
    server.begin(range(len(SUBJECTS)))
    for key, page in pages.items():
        begin(page)
        for count, words in enumerate(CHATS[key], 1):
            say(page, words)
            page.locator(".strip").nth(count - 1).wait_for()
    shoot("chat")
    with server.load():
        for key, page in pages.items():
            page.locator("#memory .key", has_text="dropped").wait_for()
            say(page, "Tell me something else.")
            page.locator(".strip").nth(len(CHATS[key])).wait_for()
            if key[0] == "phone":
                page.get_by_role("button", name="Cache").click()
        enough = "least => document.querySelector('#timeline canvas').dataset.points >= least"
        pages["desktop", "light"].wait_for_function(enough, arg=200, timeout=300_000)
        shoot("load", showing="[data-lane=gpu-host] .busy.out")
    for (name, _), page in pages.items():
        if name == "phone":
            page.get_by_role("button", name="Cache").click()
        page.route("**/v1/**", lambda route: route.abort())
        page.route("**/ui/state", lambda route: route.abort())
        say(page, "Are you there?")
        page.locator("#load", has_text="No figures").wait_for()
        page.locator("#error", has_text="Not sent").wait_for()
    shoot("error")


def animate(browser, server, file):
    """A user talks, is away while others talk, and comes back. The others talk about other things:
    they share no chunk with this user. Returns whether chunks were loaded: on a slow machine all
    may be dropped between two looks."""
    server.begin(range(len(SUBJECTS)))
    page = context_of(browser, DESKTOP, reduced_motion="no-preference").new_page()
    page.goto(f"{server.url}/ui")
    page.locator("article").first.wait_for()
    begin(page)
    frames = []

    def film(chapter, until, more=6):
        """Pictures until there is an element of this kind, and some more."""
        while more:
            frames.append(framed(page.screenshot(), STORY[chapter]))
            more -= page.locator(until).count() > 0

    say(page, "Tell me about the Sun.")
    film("arrive", ":nth-match(.strip, 1)")
    say(page, "Write a short poem about the Sun.")
    film("arrive", ":nth-match(.strip, 2)")
    with server.load(at_once=1):
        film("away", "#memory .dropped:nth-child(2)", more=1)
    say(page, "Tell me more.")
    film("back", ":nth-match(.strip, 3)")
    durations = [FRAME_MS] * (len(frames) - 1) + [LAST_FRAME_MS]
    frames[0].save(
        file,
        save_all=True,
        append_images=frames[1:],
        duration=durations,
        loop=0,
        quality=40,
        method=2,
    )
    return page.locator(".strip").nth(2).locator(".host, .disk").count() > 0


def begin(page):
    if page.get_by_role("button", name="Chats").is_visible():
        page.get_by_role("button", name="Chats").click()
    page.get_by_role("button", name="New chat").click()
    page.locator("#temperature").evaluate("input => (input.value = 0)")


def say(page, words):
    page.get_by_role("textbox", name="Message").fill(words)
    page.get_by_role("button", name="Send").click()


def save(picture, file):
    """In all its colours: a palette tints the page's background."""
    Image.open(io.BytesIO(picture)).convert("RGB").save(file, optimize=True)


def framed(picture, caption):
    """The picture, smaller, above its caption."""
    image = Image.open(io.BytesIO(picture)).convert("RGB")
    height = round(image.height * WIDTH / image.width)
    frame = Image.new("RGB", (WIDTH, height + CAPTION), "#10151a")
    frame.paste(image.resize((WIDTH, height), Image.Resampling.LANCZOS))
    place = (WIDTH / 2, height + CAPTION / 2)
    ImageDraw.Draw(frame).text(place, caption, "white", ImageFont.load_default(18), anchor="mm")
    return frame


if __name__ == "__main__":
    main()
