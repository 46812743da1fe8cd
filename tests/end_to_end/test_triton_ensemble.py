"""TensorRT-LLM's clients of its models `ensemble` and `tensorrt_llm_bls`, with the real Triton
Inference Server.

The environment variable TENSORRT_LLM_CLIENTS may name a folder with TensorRT-LLM's client scripts
(its repository's triton_backend/inflight_batcher_llm/client): they run too, unchanged.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from queue import SimpleQueue

import numpy as np
import pytest

from .server import HTTP, wait_for
from .triton_server import TritonServer, needs_triton

pytestmark = [pytest.mark.slow, needs_triton]

grpc = pytest.importorskip("tritonclient.grpc", reason="needs tritonclient[grpc]")
utils = pytest.importorskip("tritonclient.utils")

NAME = "tensorrt_llm_bls"
PROMPT = "Hello there"
SCRIPT = Path(os.environ.get("TENSORRT_LLM_CLIENTS", "/nowhere"), "end_to_end_grpc_client.py")
needs_script = pytest.mark.skipif(
    not SCRIPT.exists(), reason="TENSORRT_LLM_CLIENTS names no folder with the client scripts"
)


@pytest.fixture(scope="module")
def triton(tmp_path_factory):
    directory = tmp_path_factory.mktemp("triton")
    options = ("--engine", "demo", "--state-dir", directory / "state", "--gpu-kv-chunks", 60)
    with TritonServer(directory, *options, name=NAME, tensors="ensemble") as running:
        yield running


@pytest.fixture(scope="module")
def text(triton):
    """The greedy reply to PROMPT."""
    whole = triton.post(text_input=PROMPT, max_tokens=12, bad_words="", stop_words="").json()
    assert whole["text_output"].startswith(PROMPT)
    return whole["text_output"].removeprefix(PROMPT)


def tensor(name, values):
    """Of shape [1, n], as TensorRT-LLM's clients send them; arrays keep theirs."""
    if not isinstance(values, np.ndarray):
        values = [values if isinstance(values, list) else [values]]
    array = np.array(values)
    kinds = {"U": np.object_, "f": np.float32, "i": np.uint64 if "seed" in name else np.int32}
    array = array.astype(kinds.get(array.dtype.kind, array.dtype))
    sent = grpc.InferInput(name, array.shape, utils.np_to_triton_dtype(array.dtype))
    sent.set_data_from_numpy(array)
    return sent


def ask(server, outputs=("text_output",), **inputs):
    """The responses of one request over gRPC. Raises InferenceServerException."""
    heard = SimpleQueue()
    with grpc.InferenceServerClient(server.grpc) as client:
        client.start_stream(lambda result, error: heard.put((result, error)))
        client.async_stream_infer(
            NAME,
            [tensor(name, value) for name, value in inputs.items()],
            outputs=[grpc.InferRequestedOutput(name) for name in outputs],
        )
        client.stop_stream()  # waits for the last response
    results = []
    while not heard.empty():
        result, error = heard.get()
        if error is not None:
            raise error
        results.append(result)
    return results


def test_streamed_pieces_are_the_whole_reply(triton, text):
    results = ask(triton, text_input=PROMPT, max_tokens=12, stream=True, temperature=1.0)
    assert len(results) > 1
    assert "".join(result.as_numpy("text_output")[0].decode() for result in results) == text
    events = []
    address = f"{triton.url}/v2/models/{NAME}/generate_stream"
    inputs = dict(text_input=PROMPT, max_tokens=12, stream=True)
    with HTTP.stream("POST", address, json=inputs, timeout=60) as response:
        events += [json.loads(line[6:]) for line in response.iter_lines() if line[:6] == "data: "]
    assert "".join(event["text_output"] for event in events) == text


def test_all_that_can_be_said_of_a_reply(triton, text):
    wanted = ("cum_log_probs", "output_log_probs", "num_output_tokens", "acceptance_rate")
    (result,) = ask(
        triton,
        ("text_output", *wanted, "kv_cache_reused_blocks", "batch_index"),
        text_input=PROMPT,
        max_tokens=12,
        exclude_input_in_output=True,
        return_log_probs=True,
        return_perf_metrics=True,
        return_num_output_tokens=True,
    )
    assert result.as_numpy("text_output")[0].decode() == text
    count = result.as_numpy("num_output_tokens")[0][0]
    assert result.as_numpy("output_log_probs").shape == (1, 1, count)
    assert result.as_numpy("cum_log_probs")[0][0] < 0
    assert result.as_numpy("batch_index")[0][0] == 0


def test_every_prompt_of_a_batch_has_its_reply(triton, text):
    """And one that cannot be served has its error."""
    rows = np.array([[PROMPT], ["Good morning"], [PROMPT]])
    lengths = np.array([[12], [3], [4]])
    inputs = dict(text_input=rows, max_tokens=lengths, end_id=np.array([[-1]] * 3))
    outputs = ("text_output", "batch_index", "num_output_tokens")
    counts = dict(return_num_output_tokens=np.array([[True]] * 3))
    results = ask(triton, outputs, **inputs, **counts, stream=np.array([[True], [False], [True]]))
    replies = ["", "", ""]
    tokens = [0, 0, 0]
    for result in results:
        row = result.as_numpy("batch_index")[0][0]
        replies[row] += result.as_numpy("text_output")[0].decode()
        tokens[row] = result.as_numpy("num_output_tokens")[0][0]
    assert tokens == [12, 3, 4]
    assert replies[0].startswith(replies[2]) and text.startswith(replies[2].rstrip())
    assert replies[1].startswith("Good morning")
    with pytest.raises(grpc.InferenceServerException, match="beam_width"):
        ask(triton, **inputs, beam_width=np.array([[1], [2], [1]]))
    wait_for(lambda: triton.metric("pensieve:num_requests_running") == 0)


def test_stop_words_bad_words_and_the_end_id(triton, text):
    word = text.split()[1]
    inputs = dict(text_input=PROMPT, max_tokens=12, exclude_input_in_output=True)
    stopped = triton.post(**inputs, stop_words=[word, "not in there"]).json()["text_output"]
    assert stopped == text[: text.index(word)]
    assert word not in triton.post(**inputs, bad_words=[word]).json()["text_output"]
    sampled = [
        triton.post(**inputs, top_k=50, temperature=2.0, random_seed=seed).json()["text_output"]
        for seed in (1, 1, 2)
    ]
    assert sampled[0] == sampled[1] != sampled[2]


@pytest.mark.parametrize(
    ("wrong", "name"),
    [
        ({"beam_width": 2}, "beam_width"),
        ({"return_context_logits": True}, "return_context_logits"),
        ({"embedding_bias_words": ["a"]}, "embedding_bias_words"),
    ],
)
def test_what_cannot_be_served_is_told(triton, wrong, name):
    inputs = dict(text_input=PROMPT, max_tokens=2, **wrong)
    assert name in triton.post(**inputs).json()["error"]
    with pytest.raises(grpc.InferenceServerException, match=name):
        ask(triton, **inputs)


def test_a_client_that_hangs_up_ends_its_request(triton):
    running = "pensieve:num_requests_running"
    with grpc.InferenceServerClient(triton.grpc) as client:
        heard = SimpleQueue()
        client.start_stream(lambda result, error: heard.put(error))
        endless = dict(text_input=PROMPT, max_tokens=1500, stream=True, end_id=-1)
        client.async_stream_infer(NAME, [tensor(name, value) for name, value in endless.items()])
        assert heard.get(timeout=60) is None
        client.stop_stream(cancel_requests=True)
    wait_for(lambda: triton.metric('pensieve:requests_total{finish="abort"}', missing=0.0) == 1)
    wait_for(lambda: triton.metric(running) == 0)


def test_triton_counts_the_requests(triton, text):
    url = f"{triton.url}/v2/models/{NAME}/stats"

    def successes():
        (stats,) = HTTP.get(url, timeout=30).json()["model_stats"]
        return stats["inference_stats"]["success"]["count"]

    before = successes()
    ask(triton, text_input=PROMPT, max_tokens=2)
    wait_for(lambda: successes() == before + 1)


def script(server, *options, prompts=PROMPT):
    """What TensorRT-LLM's client script prints."""
    command = [sys.executable, SCRIPT, "-u", server.grpc, "--model-name", NAME, "-p", prompts]
    done = subprocess.run(
        [*map(str, [*command, *options])], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert "Received an error" not in done.stdout, done.stdout
    return done.stdout


@needs_script
@pytest.mark.parametrize(
    "options",
    [
        (),
        ("--streaming",),
        ("--exclude-input-in-output",),
        ("--return-log-probs", "--streaming"),
        ("--return-perf-metrics",),
        ("--return-perf-metrics", "--streaming"),
        ("--batch-inputs",),
        ("--pad-id", 2, "--repetition-penalty", 1.0, "--presence-penalty", 0.0),
        ("--num-return-sequences", 1),
        ("--request-id", "mine", "--bad-words", "zebra", "--stop-words", "not in there"),
    ],
    ids=lambda options: " ".join(map(str, options)) or "none",
)
def test_the_client_script_gets_what_it_expects(triton, text, options):
    expected = ("--check-outputs", "--expected-outputs", json.dumps([text]))
    script(triton, "-o", 12, *options, *expected)


@needs_script
@pytest.mark.parametrize("options", [(), ("--streaming",)], ids=["whole", "streamed"])
@pytest.mark.parametrize("way", [(), ("--batch-inputs",)], ids=["one by one", "at once"])
def test_the_client_script_sends_several_prompts(triton, text, way, options):
    prompts = json.dumps([PROMPT, PROMPT])
    expected = ("--check-outputs", "--expected-outputs", json.dumps([text, text]))
    script(triton, "-o", 12, *way, *options, *expected, prompts=prompts)
