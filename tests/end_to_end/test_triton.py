"""The real Triton Inference Server with a repository that `pensieve triton-repository` wrote, over
gRPC and HTTP."""

from __future__ import annotations

import json
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Listener

import numpy as np
import pytest

from pensieve.scripts.pensieve import main

from .server import Server, wait_for
from .triton_client import Client, grpc
from .triton_server import TritonServer, needs_triton

pytestmark = pytest.mark.slow

TURNS = 10
SECONDS = 120
CACHE = (
    "--gpu-kv-chunks",
    60,
    "--host-kv-chunks",
    100,
    "--max-model-len",
    1600,
    "--max-num-seqs",
    4,
)
GREEDY = dict(sampling_param_temperature=0.0, sampling_param_ignore_eos=True)
SAY = (
    "import sys; from multiprocessing.connection import Client; Client(sys.argv[2], "
    "'AF_UNIX').send({!r})"
)
BROKEN = {"refused": SAY.format("--some-setting: is wrong"), "silent": "raise SystemExit(7)"}


@pytest.fixture(scope="module")
def triton(tmp_path_factory):
    directory = tmp_path_factory.mktemp("triton")
    options = ("--engine", "demo", "--state-dir", directory / "state", *CACHE)
    with TritonServer(directory, *options, broken=BROKEN) as running:
        yield running
        # 1: Triton 24.10 sometimes does not unload the model after a client cancelled just when its
        # reply ended.
        assert running.stop() in (0, 1), running.log


@pytest.fixture(scope="module")
def http(tmp_path_factory):
    """`pensieve serve`, starting but not awaited: a test that needs it enters it."""
    server = Server(tmp_path_factory.mktemp("http"), *CACHE)
    yield server
    server.process.kill()
    server.process.wait()


def by_ids(server, turn, history):
    """A turn over gRPC with the whole history as ids; seeded sampling. Returns the history after
    it."""
    prompt = [*history, *range(40 + turn, 60 + turn)]
    with Client(server) as client:
        client.send(
            input_ids=prompt,
            conversation_id="by ids",
            streaming=True,
            sampling_param_max_tokens=24,
            sampling_param_temperature=0.75,
            sampling_param_top_k=20,
            sampling_param_seed=turn,
            sampling_param_ignore_eos=True,
        )
        ids, _, _ = client.reply()
    return [*prompt, *ids]


def by_text(server, turn, replies):
    """A turn over HTTP of which the server keeps the history; greedy."""
    first = {} if turn == 0 else {"history": "server"}
    inputs = dict(
        text_input=f"And what of number {turn}?",
        conversation_id="by text",
        sampling_param_max_tokens=20,
    )
    ids = []
    for event in server.events(**inputs, **first, **GREEDY):
        new = event["output_ids"]  # Triton writes a list of one as its one element
        ids += new if isinstance(new, list) else [new]
    return [*replies, ids]


def in_turns(first, second):
    """Calls both `TURNS` times, each with its previous return value; neither begins a turn before
    the other does."""
    together = threading.Barrier(2, timeout=SECONDS)

    def play(one):
        state = []
        for turn in range(TURNS):
            together.wait()
            state = one(turn, state)
        return state

    with ThreadPoolExecutor(2) as threads:
        return [
            future.result()
            for future in [threads.submit(play, first), threads.submit(play, second)]
        ]


@needs_triton
def test_two_clients_get_the_tokens_of_the_http_server(http, triton):
    """Ten turns each, interleaved: one over gRPC, one over HTTP; then the same turns at `pensieve
    serve`."""
    history, replies = in_turns(
        lambda turn, state: by_ids(triton, turn, state),
        lambda turn, state: by_text(triton, turn, state),
    )
    with http as server:
        expected_history, expected_replies = [], []
        for turn in range(TURNS):
            body = dict(return_token_ids=True, ignore_eos=True)
            prompt = [*expected_history, *range(40 + turn, 60 + turn)]
            sampled = dict(max_tokens=24, temperature=0.75, top_k=20, seed=turn)
            answer = server.post(
                "/v1/completions", prompt=prompt, conversation="by ids", **sampled, **body
            ).json()
            expected_history = [*prompt, *answer["choices"][0]["token_ids"]]
            body |= dict(
                prompt=f"And what of number {turn}?",
                conversation="by text",
                max_tokens=20,
                temperature=0,
            )
            answer = server.post(
                "/v1/completions", **body, history="server" if turn else "client"
            ).json()
            expected_replies.append(answer["choices"][0]["token_ids"])
    assert history == expected_history
    assert replies == expected_replies


@needs_triton
def test_many_requests_are_in_flight_at_once(triton):
    """With one instance and one stream; responses carry their request's id."""
    with Client(triton) as client:
        for number in range(12):
            client.send(
                str(number),
                input_ids=[40 + number] * 8,
                sampling_param_max_tokens=9 + number,
                **GREEDY,
            )
        lengths = {}
        for _ in range(12):
            result = client.next()
            lengths[int(result.get_response().id)] = len(result.as_numpy("output_ids"))
    assert lengths == {number: 9 + number for number in range(12)}


@needs_triton
def test_a_whole_reply_with_all_that_can_be_said_of_it(triton):
    prompt = list(range(60, 160))
    inputs = dict(sampling_param_max_tokens=4, sampling_param_return_perf_metrics=True, **GREEDY)
    first = triton.post(
        input_ids=prompt, return_finish_reason=True, return_cumulative_logprob=True, **inputs
    ).json()
    assert len(first["output_ids"]) == 4
    assert first["finish_reason"] == "length"
    assert first["cumulative_logprob"] < 0
    assert (
        first["kv_cache_reused_block"],
        first["kv_cache_missed_block"],
        first["kv_cache_hit_rate"],
    ) == (0, 4, 0)
    # 100 + 3 tokens
    assert (first["kv_cache_alloc_new_blocks"], first["kv_cache_alloc_total_blocks"]) == (4, 4)
    times = [
        first[f"{name}_time_ns"]
        for name in ("arrival", "first_scheduled", "first_token", "last_token")
    ]
    assert times == sorted(times) and times[0] < times[3]
    again = triton.post(input_ids=prompt, **inputs).json()
    assert (again["kv_cache_reused_block"], again["kv_cache_missed_block"]) == (3, 1)
    assert again["kv_cache_hit_rate"] == pytest.approx(0.96)  # 96 tokens in three chunks of 32
    assert again["output_ids"] == first["output_ids"]
    assert not {"finish_reason", "cumulative_logprob"} & set(again)


@needs_triton
def test_stop_strings_and_the_prompt_before_the_reply(triton):
    inputs = dict(text_input="Hello there", sampling_param_max_tokens=9, **GREEDY)
    text = triton.post(**inputs).json()["text_output"]
    word = text.split()[1]
    wanted = dict(return_finish_reason=True, return_stop_reason=True)
    stopped = triton.post(**inputs, sampling_param_stop=[word, "not in there"], **wanted).json()
    assert (stopped["text_output"], stopped["finish_reason"]) == (text[: text.index(word)], "stop")
    assert stopped["stop_reason"] == word
    echoed = triton.post(**inputs, sampling_param_exclude_input_from_output=False).json()[
        "text_output"
    ]
    assert echoed == "Hello there" + text


@needs_triton
def test_a_sequence_id_names_a_conversation(triton):
    with Client(triton) as client:
        client.send(sequence_id=77, input_ids=[50] * 40, sampling_param_max_tokens=5, **GREEDY)
        client.reply()
        more = dict(
            history="server",
            sampling_param_max_tokens=5,
            sampling_param_return_perf_metrics=True,
            **GREEDY,
        )
        client.send(input_ids=[51] * 30, conversation_id="77", **more)
        _, _, last = client.reply()
        # all but the last token, which has no KV
        assert last.as_numpy("kv_cache_hit_rate")[0] == np.float32(44 / 75)


@needs_triton
@pytest.mark.parametrize("way", ["gRPC stream cancelled", "HTTP client gone", "stop"])
def test_cancelling_in_mid_stream_frees_everything(triton, way):
    aborted = 'pensieve:requests_total{finish="abort"}'
    before = triton.metric(aborted, missing=0.0)
    endless = dict(input_ids=[45] * 20, streaming=True, sampling_param_max_tokens=1500, **GREEDY)
    if way == "HTTP client gone":
        stream = triton.events(**endless)
        next(stream)
        stream.close()
    else:
        with Client(triton) as client:
            client.send("endless", **endless)
            client.next()
            if way == "gRPC stream cancelled":
                client.cancel()
            else:
                with Client(triton) as other:
                    other.send("endless", input_ids=[1], stop=True)
                    assert "cancelled" in other.refusal()
                with pytest.raises(grpc.InferenceServerException, match="cancelled"):
                    client.reply()
    wait_for(lambda: triton.metric(aborted, missing=0.0) == before + 1)
    wait_for(lambda: triton.metric("pensieve:num_requests_running") == 0)
    wait_for(lambda: triton.metric('pensieve:kv_slots{state="in_use",tier="gpu"}') == 0)


@needs_triton
@pytest.mark.parametrize(
    ("inputs", "parts"),
    [
        (dict(input_ids=[50] * 3000), ["3000", "1600"]),
        (dict(input_ids=[50], sampling_param_top_p=1.5), ["top_p", "1.5"]),
        (dict(input_ids=[50], sampling_param_best_of=2), ["best_of"]),
        (dict(input_ids=[50], text_input="hello"), ["one of them"]),
        (dict(streaming=True), ["no prompt"]),
        (dict(stop=True), ["request id"]),
        (dict(text_input="hi", conversation_id="unknown", history="server"), ["unknown"]),
    ],
)
def test_what_cannot_be_served_is_told(triton, inputs, parts):
    answer = triton.post(**inputs)
    assert answer.status_code == 400  # generate's for every error
    assert all(part in answer.text for part in parts), answer.text
    with Client(triton) as client:
        client.send(**inputs)
        assert client.refusal() == answer.json()["error"]


def test_the_engine_says_what_setting_is_wrong(tmp_path):
    options = ["--engine", "demo", "--state-dir", str(tmp_path), "--max-model-len", "100000"]
    with Listener(str(tmp_path / "socket"), "AF_UNIX") as model:
        assert main(["serve", *options, "--attach", model.address]) == 2
        assert "--max-model-len" in model.accept().recv()


@needs_triton
def test_a_model_without_an_engine_is_not_loaded(triton):
    assert "--some-setting: is wrong" in triton.why_not_loaded("refused")
    assert "has ended with status 7" in triton.why_not_loaded("silent")


@pytest.mark.parametrize(
    ("options", "setting"),
    [
        (["--engine", "/nowhere/at/all"], "--engine"),
        (["--engine", "demo", "--port", "80"], "--port"),
        (["--engine", "demo", "--api-key", "secret"], "--api-key"),
        (["--engine", "demo", "--owner-kv-bytes", "1GiB"], "--owner-kv-bytes"),
        (["--engine", "demo", "--name", "../other"], "--name"),
        (["--engine", "demo", "--attach", "socket"], "--attach"),
    ],
)
def test_a_wrong_option_writes_nothing_and_is_named(tmp_path, capsys, options, setting):
    assert main(["triton-repository", "--output", str(tmp_path), *options]) == 2
    assert setting in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_paths_hold_in_any_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "built").mkdir()
    (tmp_path / "built" / "manifest.json").touch()
    given = {"engine": "built", "state-dir": "state", "disk-dir": "kv", "trace": "steps.json"}
    options = [word for name, path in given.items() for word in (f"--{name}", path)]
    assert (
        main(["triton-repository", "--output", "models", "--disk-kv-bytes", "1GiB", *options]) == 0
    )
    written = (tmp_path / "models" / "pensieve" / "config.pbtxt").read_text()
    assert [
        name for name, path in given.items() if f"--{name}={tmp_path / path}" not in written
    ] == []


def test_packages_in_pythonpath_are_found_by_the_stub_and_by_the_engine(tmp_path, monkeypatch):
    """The stub ignores the variable, and Triton may be started without it."""
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:/elsewhere")
    assert main(["triton-repository", "--output", str(tmp_path / "models"), "--engine=demo"]) == 0
    model = (tmp_path / "models" / "pensieve" / "1" / "model.py").read_text()
    assert f"sys.path[:0] = ['{tmp_path}', '/elsewhere']\n\nfrom pensieve" in model
    command = [sys.executable, "-P", "-m", "pensieve.scripts.pensieve", "serve", "--engine=demo"]
    hidden = ["-u", "PYTHONHOME", "-u", "PYTHONSTARTUP"]
    words = json.dumps(["env", *hidden, f"PYTHONPATH={tmp_path}:/elsewhere", *command])
    assert json.dumps(words) in (tmp_path / "models" / "pensieve" / "config.pbtxt").read_text()
