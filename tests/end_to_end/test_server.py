"""The contract, over HTTP, with a real server of the demo engine."""

from __future__ import annotations

import contextlib
import json
import signal
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from pensieve.runtime.observe.vllm_metrics import COPIED

from .server import HTTP, Hog, Server, wait_for


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    options = (
        "--gpu-kv-chunks",
        200,
        "--host-kv-chunks",
        200,
        "--max-model-len",
        2048,
        "--max-queue",
        8,
    )
    with Server(tmp_path_factory.mktemp("state"), *options, "--max-num-seqs", 4) as running:
        yield running


def test_the_second_turn_finds_the_first(server):
    """`cached_tokens` is at least the first turn's prompt and reply, less the last token (it has no
    KV yet)."""
    first = list(range(40, 140))
    turn = server.post(
        "/v1/completions",
        prompt=first,
        max_tokens=21,
        conversation="two",
        return_token_ids=True,
        ignore_eos=True,
    ).json()
    reply = turn["choices"][0]["token_ids"]
    assert len(reply) == 21
    second = [*first, *reply, *range(50, 60)]
    turn = server.post(
        "/v1/completions", prompt=second, max_tokens=5, conversation="two", ignore_eos=True
    ).json()
    assert turn["usage"]["prompt_tokens"] == 131
    assert turn["usage"]["prompt_tokens_details"]["cached_tokens"] >= 100 + 21 - 1


def test_a_whole_history_without_an_id_is_reused_too(server):
    prompt = list(range(60, 188))
    server.post("/v1/completions", prompt=prompt, max_tokens=2, ignore_eos=True)
    turn = server.post(
        "/v1/completions", prompt=[*prompt, 7, 8], max_tokens=2, ignore_eos=True
    ).json()
    assert turn["usage"]["prompt_tokens_details"]["cached_tokens"] == 128


def test_equal_requests_give_equal_replies_with_any_cache(server):
    body = dict(prompt=list(range(30, 130)), max_tokens=12, ignore_eos=True, return_token_ids=True)
    greedy = [
        server.post("/v1/completions", temperature=0, **body).json()["choices"][0]["token_ids"]
        for _ in range(3)
    ]
    seeded = [
        server.post("/v1/completions", seed=11, **body).json()["choices"][0]["token_ids"]
        for _ in range(2)
    ]
    assert greedy[0] == greedy[1] == greedy[2]
    assert seeded[0] == seeded[1] != greedy[0]


def test_the_official_client_holds_a_streamed_conversation(server):
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
    messages = [{"role": "system", "content": "You are brief. " * 10}]
    cached = []
    for number in range(4):
        messages.append({"role": "user", "content": f"Question number {number}, please answer."})
        text = ""
        finish = None
        for event in client.chat.completions.create(
            model="demo",
            messages=messages,
            max_tokens=24,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"conversation": "official"},
        ):
            if event.usage is not None:
                cached.append(
                    (event.usage.prompt_tokens_details.cached_tokens, event.usage.prompt_tokens)
                )
            for choice in event.choices:
                text += choice.delta.content or ""
                finish = choice.finish_reason or finish
        assert finish in ("stop", "length")
        messages.append({"role": "assistant", "content": text})
    assert [reused > 0 for reused, _ in cached] == [False, True, True, True]
    assert all(later[1] > earlier[1] for earlier, later in pairwise(cached))


def streamed_ids(server, **body):
    body |= dict(model="demo", stream=True, ignore_eos=True, return_token_ids=True)
    with HTTP.stream("POST", f"{server.url}/v1/completions", json=body) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                for choice in json.loads(line[6:])["choices"]:
                    yield from choice["token_ids"]


def test_streamed_pieces_carry_token_ids(server):
    assert len(list(streamed_ids(server, prompt=[40] * 9, max_tokens=6))) == 6


def test_a_prompt_beyond_the_context_is_told_both_numbers(server):
    response = server.post("/v1/completions", prompt=[50] * 3000, max_tokens=1)
    assert response.status_code == 400
    assert (
        "3000" in response.json()["error"]["message"]
        and "2048" in response.json()["error"]["message"]
    )


def test_a_client_that_hangs_up_aborts_its_request(server):
    with Hog(server, 1900):
        wait_for(lambda: server.metric("pensieve:num_requests_running") == 1)
    wait_for(lambda: server.metric("pensieve:num_requests_running") == 0)
    wait_for(lambda: server.metric('pensieve:kv_slots{state="in_use",tier="gpu"}') == 0)


def test_a_full_queue_refuses_with_retry_after(server):
    """Four run, eight wait, the rest get 429; no request hangs."""

    def ask(number):
        return server.post("/v1/completions", prompt=[number] * 30, max_tokens=15, ignore_eos=True)

    with ThreadPoolExecutor(8) as pool:
        with contextlib.ExitStack() as seats:
            for _ in range(4):
                seats.enter_context(Hog(server, 1900))
            waiting = [pool.submit(ask, number) for number in range(40, 48)]
            wait_for(lambda: server.metric("pensieve:num_requests_waiting") == 8)
            refused = list(map(ask, range(50, 55)))
        assert all(answer.result().status_code == 200 for answer in waiting)
    assert all(answer.status_code == 429 and "retry-after" in answer.headers for answer in refused)


def test_concurrent_conversations_swap_and_stay_right(server):
    """More history than the GPU cache holds; each reply equals the one without a cache."""
    histories = {name: [40 + name] * 3 for name in range(12)}
    for _ in range(4):
        for name, history in histories.items():
            prompt = [*history, *range(30 + name, 130 + name)]
            body = dict(
                prompt=prompt, max_tokens=10, temperature=0, ignore_eos=True, return_token_ids=True
            )
            reply = server.post("/v1/completions", conversation=f"swap{name}", **body).json()
            histories[name] = [*prompt, *reply["choices"][0]["token_ids"]]
    assert server.metric('pensieve:kv_copied_bytes_total{direction="swap_out"}') > 0
    for name, history in histories.items():
        fresh = dict(
            prompt=history[:-10],
            max_tokens=10,
            temperature=0,
            ignore_eos=True,
            return_token_ids=True,
        )
        assert (
            server.post("/v1/completions", **fresh).json()["choices"][0]["token_ids"]
            == history[-10:]
        ), name


def test_metrics_count_every_prompt_token_once(server):
    sources = [
        f'pensieve:prompt_tokens_total{{source="{s}"}}'
        for s in ("gpu", "host", "disk", "recomputed", "new")
    ]
    before = sum(server.metric(source) for source in sources)
    server.post("/v1/completions", prompt=[33] * 77, max_tokens=3, ignore_eos=True)
    assert sum(server.metric(source) for source in sources) - before == 77


def test_metrics_are_told_under_vllms_names_too(server):
    """Of one scrape: all are there, for the one engine, and equal ours, of which some have more
    labels."""
    chat = [{"role": "user", "content": "Tell me about rain."}]
    assert server.post("/v1/chat/completions", messages=chat, max_tokens=5).status_code == 200
    text = HTTP.get(f"{server.url}/metrics").text
    families = {family.name: family for family in text_string_to_metric_families(text)}

    def values(name, *kept):
        """By suffix and the labels that are kept, summed over the others."""
        totals = Counter()
        for sample in families[name].samples:
            totals[
                sample.name.removeprefix(name), *(sample.labels.get(label) for label in kept)
            ] += sample.value
        return totals

    for name, ours in COPIED.items():
        assert values(name, "le") == values(ours, "le"), name
        for sample in families[name].samples:
            assert sample.labels.keys() - {"le"} == {"model_name", "engine"}
            assert (sample.labels["model_name"], sample.labels["engine"]) == ("demo", "0")
    for name in (
        "vllm:prompt_tokens",
        "vllm:time_to_first_token_seconds",
        "vllm:request_queue_time_seconds",
    ):
        assert max(values(name).values()) > 0
    ended, told = (
        values("pensieve:requests", "finish"),
        values("vllm:request_success", "finished_reason"),
    )
    assert all(told[place] == ended[place] for place in told) and told["_total", "length"] > 0
    (cache,) = families["vllm:cache_config_info"].samples
    assert (cache.labels, cache.value) == (
        {"block_size": "32", "num_gpu_blocks": "200", "engine": "0"},
        1,
    )


def test_sigterm_finishes_running_requests(tmp_path):
    with Server(tmp_path, "--shutdown-timeout", 60) as server:
        ids = streamed_ids(server, prompt=[40] * 10, max_tokens=80)
        next(ids)
        server.process.send_signal(signal.SIGTERM)
        assert 1 + len(list(ids)) == 80
        assert server.process.wait(60) == 0


@pytest.mark.slow
def test_sigterm_ends_requests_that_outlast_the_grace(tmp_path):
    with Server(tmp_path, "--shutdown-timeout", 0.5) as server:
        answers = []
        body = dict(prompt=[40] * 10, max_tokens=3000, ignore_eos=True)
        thread = threading.Thread(
            target=lambda: answers.append(server.post("/v1/completions", **body))
        )
        thread.start()
        wait_for(lambda: server.metric("pensieve:num_requests_running") == 1)
        assert server.stop() == 0
        thread.join(60)
        assert answers[0].status_code == 503


@pytest.mark.parametrize(
    ("options", "setting"),
    [
        (("--gpu-kv-chunks", 4, "--max-model-len", 2048), "--max-model-len"),
        (("--max-model-len", 100_000), "--max-model-len"),
        (("--gpu-kv-bytes", "lots"), "--gpu-kv-bytes"),
        (("--swap-out-below", 2), "--swap-out-below"),
        (("--port", 99999), "--port"),
    ],
)
def test_a_wrong_setting_stops_the_start_and_is_named(tmp_path, capsys, options, setting):
    from pensieve.scripts.pensieve import main

    assert (
        main(
            [
                "serve",
                "--engine",
                "demo",
                "--port",
                "0",
                "--state-dir",
                str(tmp_path),
                *map(str, options),
            ]
        )
        == 2
    )
    assert setting in capsys.readouterr().err


def test_a_conversation_outgrows_the_context(server):
    """Its oldest tokens are no longer seen, and the reply reports that; the next turn finds the KV
    of the visible tokens."""
    prompt = [40 + number % 900 for number in range(2100)]
    body = dict(max_tokens=8, ignore_eos=True, return_token_ids=True)
    assert server.post("/v1/completions", prompt=prompt, **body).status_code == 400
    turn = server.post("/v1/completions", prompt=prompt, conversation="long", **body).json()
    assert turn["usage"]["prompt_tokens_details"]["truncated_tokens"] == 1024
    again = [*prompt, *turn["choices"][0]["token_ids"], 50, 51]
    turn = server.post("/v1/completions", prompt=again, conversation="long", **body).json()
    details = turn["usage"]["prompt_tokens_details"]
    assert details["truncated_tokens"] == 1024 and details["cached_tokens"] >= 2100 + 7 - 1024
