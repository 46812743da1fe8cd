"""Tests of an engine behind the real Triton Inference Server, for every backend and device."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.models import save_random, tiny_config

from .server import HTTP, wait_for

CACHE = ("--gpu-kv-chunks", 300, "--host-kv-chunks", 100, "--max-num-seqs", 4)
POSITIONS = 8192
REPLY = 12
GREEDY = dict(sampling_param_temperature=0.0, sampling_param_ignore_eos=True)
WAYS = ("HTTP client gone", "stop", "gRPC stream cancelled")


def small_checkpoint(kind, directory):
    """A tiny model with room for a reply that is still being made when it is cancelled."""
    config = tiny_config(kind)
    config.max_position_embeddings = POSITIONS
    save_random(config, directory)


def turns(reply_to, count=4):
    """The replies of a conversation, of which each prompt has all earlier turns."""
    ids = []
    replies = []
    for turn in range(count):
        ids += [(7 * turn + place) % 150 + 3 for place in range(30)]
        replies.append(reply_to(ids))
        ids += replies[-1]
    return replies


def by_serve(server):
    """Replies of `pensieve serve`, to compare with."""
    body = dict(max_tokens=REPLY, temperature=0, ignore_eos=True, return_token_ids=True)
    model = HTTP.get(f"{server.url}/v1/models").json()["data"][0]["id"]

    def reply_to(ids):
        answer = server.post("/v1/completions", model=model, prompt=ids, **body)
        return answer.json()["choices"][0]["token_ids"]

    return reply_to


def whole(triton, name):
    """Replies over HTTP, each in one response. name: of the conversation."""
    inputs = dict(conversation_id=name, sampling_param_max_tokens=REPLY, **GREEDY)
    return lambda ids: triton.post(input_ids=ids, **inputs).json()["output_ids"]


def streamed(triton, name):
    """Replies over HTTP, in as many responses as the client takes: tokens that wait are one."""
    inputs = dict(conversation_id=name, sampling_param_max_tokens=REPLY, **GREEDY)

    def reply_to(ids):
        pieces = [event["output_ids"] for event in triton.events(input_ids=ids, **inputs)]
        assert pieces
        # Triton writes a list of one as its one element
        lists = [piece if isinstance(piece, list) else [piece] for piece in pieces]
        return [token for piece in lists for token in piece]

    return reply_to


class BehindTriton:
    """Tests for a class with the fixtures `triton`, a TritonServer, and `expected`: the greedy
    replies of the reference backend, `turns(by_serve(server))`."""

    def test_two_conversations_at_once_get_the_references_replies(self, triton, expected):
        ways = [whole(triton, "whole"), streamed(triton, "streamed")]
        with ThreadPoolExecutor(2) as threads:
            assert list(threads.map(turns, ways)) == [expected, expected]

    def test_a_stream_over_grpc_gets_the_references_replies(self, triton, expected):
        from .triton_client import Client

        inputs = dict(streaming=True, sampling_param_max_tokens=REPLY, **GREEDY)

        def reply_to(ids):
            client.send(input_ids=ids, conversation_id="over gRPC", **inputs)
            return client.reply()[0]

        with Client(triton) as client:
            assert turns(reply_to) == expected

    @pytest.mark.parametrize("way", WAYS)
    def test_cancelling_in_mid_stream_frees_everything(self, triton, way):
        aborted = 'pensieve:requests_total{finish="abort"}'
        before = triton.metric(aborted, missing=0.0)
        endless = dict(input_ids=[45] * 20, sampling_param_max_tokens=POSITIONS - 100, **GREEDY)
        if way == "gRPC stream cancelled":
            from .triton_client import Client

            with Client(triton) as client:
                client.send(streaming=True, **endless)
                client.next()
                client.cancel()
        else:
            stream = triton.events(id="endless", **endless)
            next(stream)
            if way == "stop":
                refused = triton.post(id="endless", input_ids=[1], stop=True)
                assert "cancelled" in refused.text
                assert "cancelled" in list(stream)[-1]["error"]
            stream.close()
        wait_for(lambda: triton.metric(aborted, missing=0.0) == before + 1)
        wait_for(lambda: triton.metric("pensieve:num_requests_running") == 0)
        wait_for(lambda: triton.metric('pensieve:kv_slots{state="in_use",tier="gpu"}') == 0)

    def test_statistics_and_metrics_count_requests_tokens_and_reuse(self, triton, expected):
        served = 'nv_inference_request_success{model="pensieve",version="1"}'
        ended = 'pensieve:requests_total{finish="length"}'
        generated = "pensieve:generation_tokens_total"
        reused = 'pensieve:prompt_tokens_total{source="gpu"}'
        names = (served, ended, generated, reused)

        def told():
            return [triton.metric(name, missing=0.0) for name in names] + [statistics(triton)]

        before = told()
        assert turns(whole(triton, "counted")) == expected
        requests = len(expected)
        new = [requests, requests, REPLY * requests]

        def counted():
            more = [now - then for now, then in zip(told(), before, strict=True)]
            return more[:3] == new and more[3] > 0 and more[4] == requests

        wait_for(counted)


def statistics(triton):
    """Requests that Triton counts as served, of its statistics."""
    told = HTTP.get(f"{triton.url}/v2/models/pensieve/stats", timeout=30).json()
    (model,) = told["model_stats"]
    return model["inference_stats"]["success"]["count"]
