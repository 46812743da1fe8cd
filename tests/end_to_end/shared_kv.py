"""Two servers of one model with a store that both use. A test class of an engine derives from
`SharedServerTests` and has the fixtures `store`, the JSON of `--kv-shared-config`, and `keys`, a
function that lists what is in the store."""

from __future__ import annotations

import json
import signal

from .patient_store import COMMAND
from .server import HTTP, Server
from .test_server import wait_for

CHUNKS = 12
SOME = range(1, 5)  # conversations, of which a server fetches at least one
SIZES = ("--chunk-tokens", 16, "--gpu-kv-chunks", 120, "--host-kv-chunks", 120)
WRITTEN = 'pensieve:kv_shared_records_total{direction="write"}'
READ = 'pensieve:kv_shared_records_total{direction="read"}'


def options(store, **more):
    return (*SIZES, "--kv-shared-config", json.dumps(store | {"min_tokens": 64} | more))


def prompt(number):
    return [5 + (number * 37 + at * 11) % 900 for at in range(16 * CHUNKS)]


def turn(server, tokens, **body):
    """Returns the reply's tokens and the sources of its prompt."""
    sampled = dict(prompt=tokens, max_tokens=9, temperature=0, ignore_eos=True)
    body = sampled | dict(return_token_ids=True, return_sources=True) | body
    answer = server.post("/v1/completions", **body).json()
    return answer["choices"][0]["token_ids"], answer["usage"]["prompt_tokens_details"]


class SharingServer(Server):
    """Waits for the store, however busy the machine is."""

    def __init__(self, state_dir, *options, engine="demo"):
        super().__init__(state_dir, *options, engine=engine, command=COMMAND)


class SharedServerTests:
    def test_a_killed_servers_conversation_goes_on_elsewhere(self, tmp_path, store, keys):
        firsts, logs, expected = {}, {}, {}
        with Server(tmp_path / "alone", *SIZES) as alone:
            for number in SOME:
                firsts[number], _ = turn(alone, prompt(number))
                logs[number] = prompt(number) + firsts[number] + [7, 8, 9]
                expected[number], _ = turn(alone, logs[number])
        with SharingServer(tmp_path / "b", *options(store)) as b:
            with SharingServer(tmp_path / "a", *options(store)) as a:
                for number in SOME:
                    reply, _ = turn(a, prompt(number), conversation=f"moved-{number}")
                    assert reply == firsts[number]
                wait_for(lambda: a.metric(WRITTEN) >= len(SOME) * CHUNKS)
                a.stop(signal.SIGKILL)
            fetched = 0
            for number in SOME:
                reply, sources = turn(b, logs[number], conversation=f"moved-{number}")
                assert reply == expected[number]
                assert sources["cached_tokens"] >= sources["shared"]
                fetched += sources["shared"]
                # the second time it is here
                assert turn(b, logs[number])[1]["shared"] == 0
            assert fetched > 0
            assert b.metric(READ) >= fetched / 16
            wait_for(lambda: len(keys()) > len(SOME) * CHUNKS)
            for number in SOME:
                path = f"/v1/conversations/moved-{number}"
                HTTP.delete(f"{b.url}{path}", timeout=30).raise_for_status()
            assert keys() == []

    def test_short_contexts_stay_here(self, tmp_path, store, keys):
        with SharingServer(tmp_path / "a", *options(store, min_tokens=16 * CHUNKS + 16)) as a:
            turn(a, prompt(1))
            assert a.stop(signal.SIGTERM) == 0
        assert keys() == []
