"""The state behind the page's map: ranges of answers, and the owners of conversations."""

from __future__ import annotations

from pensieve.runtime.conversations.schema import Name
from pensieve.runtime.conversations.turns import kv_name
from pensieve.runtime.messages import Look
from pensieve.runtime.observe.residency import LOOK_INTERVAL_S, ResidencyView
from pensieve.scheduler.types import ConversationKV, Residency

from ..served import run, serve  # noqa: F401  (a fixture)


def entry(name: str, gpu: int = 1) -> ConversationKV:
    return ConversationKV(name, {"gpu": gpu, "host": 2, "dropped": 3})


def names(view: ResidencyView, owner: str = "") -> list[str]:
    return [entry.conversation for entry in view.of(owner)]


def test_the_loop_is_asked_for_one_stretch_at_a_time_and_not_too_often() -> None:
    view = ResidencyView()
    assert view.due(1.0) == 0
    assert view.due(1.0 + LOOK_INTERVAL_S / 2) is None
    view.take(Residency(32, [entry("a"), entry("b")], 2))
    assert view.due(1.0 + LOOK_INTERVAL_S) == 2
    view.take(Residency(32, [entry("c")], 0, start=2))
    assert view.due(1.0 + 2 * LOOK_INTERVAL_S) == 0
    assert view.chunk_tokens == 32 and names(view) == ["c", "b", "a"]


def test_a_conversation_missing_in_a_whole_round_is_removed() -> None:
    view = ResidencyView()
    view.take(Residency(32, [entry("a"), entry("b"), entry("c")], 0))
    view.take(Residency(32, [entry("a", gpu=9)], 1))
    assert list(view.of("")) == [entry("c"), entry("b"), entry("a", gpu=9)]
    view.take(Residency(32, [entry("c")], 0, start=1))
    assert names(view) == ["c", "a"]


def test_a_conversation_is_found_by_the_loop_s_name() -> None:
    view = ResidencyView()
    view.take(Residency(32, [entry("a"), entry("conversation:f0:a", gpu=5)], 0))
    assert (
        view.find("conversation:f0:a") == entry("conversation:f0:a", gpu=5)
        and view.find("b") is None
    )


def test_two_open_pages_lose_no_conversation() -> None:
    """Each page asks for every range, so each range arrives twice."""
    view = ResidencyView()
    for stretch in (Residency(32, [entry("a")], 1), Residency(32, [entry("b")], 0, start=1)):
        view.take(stretch)
        view.take(stretch)
    assert names(view, "") == ["b", "a"]


def test_owners_see_their_own_by_the_names_they_gave() -> None:
    view = ResidencyView()
    own = [Name(owner, name) for owner in ("f00", "f0") for name in ("tea: black", "coffee")]
    answers = [entry(kv_name(name, name.id)) for name in [*own, Name("f0", "resp_1", "response")]]
    view.take(Residency(32, answers, 0))
    assert names(view, "f00") == ["coffee", "tea: black"]
    assert names(view, "f0") == ["resp_1", "coffee", "tea: black"]
    assert names(view, "f") == []


def test_the_state_needs_a_key_and_the_files_do_not(serve) -> None:  # noqa: F811
    async def work() -> None:
        async with serve(keys=("secret",)) as served:
            for path, kind in (
                ("/ui", "text/html"),
                ("/ui/app.js", "text/javascript"),
                ("/ui/icon.svg", "image/svg"),
            ):
                answer = await served.http.get(path)
                assert answer.status_code == 200 and answer.headers["content-type"].startswith(kind)
                policy = answer.headers["content-security-policy"]
                assert "default-src 'none'" in policy and "unsafe" not in policy
                assert answer.headers["x-content-type-options"] == "nosniff"
                content = answer.text.replace("http://www.w3.org/2000/svg", "")
                assert "http:" not in content and "https:" not in content
            await served.ask("GET", "/ui/state", status=401)
            await served.chat("Hello", key="secret")
            state = await served.ask("GET", "/ui/state", key="secret")
            assert (
                state["first_token"]["count"] == 1
                and state["generated"] > 0
                and state["conversations"] == []
            )
            assert served.loop.messages(Look, 1) == [Look(0)]
            for path in (
                "/ui/../ui_api.py",
                "/ui/%2e%2e/ui_api.py",
                "/ui/nothing.js",
                "/ui/..%2fui_api.py",
            ):
                await served.ask("GET", path, status=404, key="secret")

    run(work())
