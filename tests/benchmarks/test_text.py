"""Streams of real conversations against a chat endpoint with known delays."""

import asyncio
import json
import re

import pytest

from benchmarks import text as bench_text
from benchmarks.clients import Target
from benchmarks.text import (
    ChatScript,
    StreamLevel,
    TextClient,
    level_line,
    main,
    plan_levels,
    read_texts,
    summarise,
)
from pensieve.scheduler.types import SettingError
from tests.benchmarks.fake_chat import PROMPT_TOKENS, ChatServer

TEXTS = [
    ChatScript(None, ("one", "two")),
    ChatScript("be kind", ("three",)),
    ChatScript(None, ("four", "five")),
]
FIELDS = {
    "model",
    "messages",
    "max_tokens",
    "temperature",
    "ignore_eos",
    "stream",
    "stream_options",
}


def level(streams=1, first=0, reply_tokens=4):
    return StreamLevel(streams, first, reply_tokens, warm_up_s=0.0, measure_s=60.0)


@pytest.fixture
def play(monkeypatch):
    """Plays a level against a server that answers so many requests and holds the others. The window
    begins at once, and ends when those have ended or failed. Returns the tally."""

    def run(server, plan):
        client = TextClient(Target(server.url, "fake"), TEXTS, plan)
        if plan.streams == 1:
            server.taken = lambda: len(client.tally.first_token) + len(client.tally.gaps)

        def ended():
            tally = client.tally
            if server.begun and len(tally.first_token) < server.answered + plan.streams:
                return False
            return tally.completed + tally.errors.total() == server.answered

        async def until(moment):
            while bench_text.clock() < moment and not ended():
                await asyncio.sleep(0.005)

        monkeypatch.setattr(bench_text, "until", until)
        return asyncio.run(client.run(range(plan.streams)))

    return run


def spoken(body):
    return [message["content"] for message in body["messages"]]


def test_a_turn_sends_the_whole_history_with_the_servers_own_replies(play):
    reply = "0 1 2 3 "
    with ChatServer(answered=4) as server:
        play(server, level())
    first, second, third, fourth = server.bodies[:4]
    assert set(first) == FIELDS and first["max_tokens"] == 4 and first["ignore_eos"] is True
    salt, _, question = spoken(first)[0].partition(" ")
    assert re.fullmatch("[0-9a-f]{8}", salt) and question == "one"
    assert spoken(second) == [f"{salt} one", reply, "two"]
    assert [message["role"] for message in second["messages"]] == ["user", "assistant", "user"]
    assert spoken(third)[0] == "be kind" and spoken(third)[1].endswith(" three")
    assert spoken(fourth)[0].endswith(" four") and salt not in spoken(fourth)[0]


def test_streams_divide_the_conversations(play):
    with ChatServer(answered=0, begun=True) as server:
        play(server, level(streams=2, first=1))
    opened = {spoken(body)[-1].split(" ")[-1] for body in server.bodies}
    assert opened == {"three", "four"}


def test_the_figures_follow_the_servers_delays(play):
    first_s, gap_s = 0.06, 0.02
    with ChatServer(first_s, gap_s, answered=3) as server:
        tally = play(server, level())
    measured = summarise(tally, level())
    assert tally.completed == 3 and not measured.errors
    # a busy machine adds to the delays, and nothing takes away from them: an event is not sent
    # before the client has taken the one before it
    assert measured.ttft_ms_p50 >= 60 and measured.inter_token_ms_p50 >= 20
    assert measured.ms_per_token_mean >= (first_s + 3 * gap_s) / 4 * 1e3
    assert measured.requests_per_s == 3 / 60
    assert measured.prompt_tokens == PROMPT_TOKENS * (1 + 3 + 2) and measured.cached_tokens == 9
    assert measured.tokens_per_event == 1.0
    assert tally.output_tokens == len(tally.first_token) + len(tally.gaps) == 12
    assert f"cached {9 / 60:.1%}" in level_line(measured)


def test_an_event_of_several_tokens_counts_as_several(play):
    """Of a reply that is still open as well."""
    with ChatServer(per_event=4, answered=2, begun=True) as server:
        tally = play(server, level(reply_tokens=16))
    assert len(tally.first_token) == 3, "a reply was open when the window ended"
    assert len(tally.gaps) == 2 * 3 and tally.output_tokens == 2 * 16 + 4
    assert summarise(tally, level()).tokens_per_event == 4.0


def test_a_server_without_cached_tokens(play):
    with ChatServer(cached=None, answered=2) as server:
        measured = summarise(play(server, level()), level())
    assert measured.cached_tokens is None and measured.prompt_tokens > 0
    assert "cached unknown" in level_line(measured)


@pytest.mark.parametrize(("fail", "kind"), [(503, "HTTP 503"), ("error", "error in the stream")])
def test_a_failure_ends_the_conversation_and_is_counted(play, monkeypatch, fail, kind):
    monkeypatch.setattr(bench_text, "PAUSE_SECONDS", 0.01)
    with ChatServer(fail=fail, answered=2) as server:
        measured = summarise(play(server, level()), level())
    assert measured.errors == {kind: 2} and measured.output_tokens_per_s == 0
    assert spoken(server.bodies[1])[0] == "be kind", "the stream goes on with the next one"
    assert kind in level_line(measured)


def test_a_reply_that_is_too_short_is_a_failure(play):
    with ChatServer(fail="short", answered=1) as server:
        measured = summarise(play(server, level()), level())
    assert measured.errors == {"short reply": 1}


def test_levels_start_at_other_conversations():
    levels = plan_levels([1, 16, 64], 90, reply_tokens=4, warm_up_s=1.0, measure_s=2.0)
    assert [(each.streams, each.first) for each in levels] == [(1, 0), (16, 30), (64, 60)]


def test_the_command_measures_levels_in_processes(tmp_path, capsys):
    data = tmp_path / "chats.jsonl"
    lines = [
        {"conversation": "a", "messages": [{"role": "user", "content": word}]}
        for word in ("one", "two", "three")
    ]
    data.write_text("\n".join(map(json.dumps, lines)))
    file = tmp_path / "out.json"
    with ChatServer(gap_s=0.01) as server:
        words = ["--url", server.url, "--data", str(data), "--streams", "1,3", "--json", str(file)]
        times = ["--warm-up-s", "0.2", "--seconds", "1", "--reply-tokens", "4"]
        assert main([*words, *times, "--processes", "2"]) == 0
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert [row["streams"] for row in rows] == [1, 3]
    assert all(row["bench"] == "text" and row["data"] == "chats.jsonl" for row in rows)
    assert all(not row["errors"] and row["output_tokens_per_s"] > 0 for row in rows)
    assert len(capsys.readouterr().out.splitlines()) == 4
    salted = [body["messages"][0]["content"] for body in server.bodies]
    assert len(set(salted)) == len(salted), "no play repeats another one's first message"


def test_data_that_cannot_be_read_is_named(tmp_path, capsys):
    data = tmp_path / "chats.jsonl"
    with pytest.raises(SettingError, match=r"--data: there is no file"):
        read_texts(data)
    data.write_text('{"messages": [{"role": "assistant", "content": "hi"}]}')
    with pytest.raises(SettingError, match=r"--data: .* holds no conversations"):
        read_texts(data)
    data.write_text('{"conversation": "a"}')
    with pytest.raises(SettingError, match=r"--data: .*line 1: needs an object with messages"):
        read_texts(data)
    assert main(["--data", str(data), "--streams", "0"]) == 2
    assert "--streams: must be at least 1" in capsys.readouterr().err


def test_a_reply_without_text_counts_when_it_ends(play):
    """A model may go on with special tokens alone, and servers show none of them."""
    with ChatServer(per_event=100, answered=2) as server:
        tally = play(server, level())
    assert not tally.errors and tally.completed == 2
    assert tally.output_tokens == 8 and not tally.first_token
