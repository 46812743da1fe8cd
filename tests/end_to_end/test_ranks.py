"""Ranks over a real MPI, on the CPU: replies are those of plain transformers, and no rank waits for
ever."""

from __future__ import annotations

import json
import os
import signal
from contextlib import suppress

import httpx
import pytest

from pensieve.builder.build import build_engine
from pensieve.runtime.llm import LLM, SamplingParams
from pensieve.runtime.system import descendants, running
from tests.models import save_random, tiny_config
from tests.mpi import command, run_ranks, variables

from .bad_disk import ON_READ, ON_WRITE
from .chatter import TIGHT
from .server import HTTP, Server
from .test_server import wait_for

EVENTS = ("gpu", "host", "recomputed", "new", "disjoint", "dropped", "aborted", "branched")


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    """(checkpoint, engine of two ranks) of a kind of model, made when first asked for."""
    engines = {}

    def make(kind, gain=2.0):
        if kind not in engines:
            directory = tmp_path_factory.mktemp(kind)
            save_random(tiny_config(kind), directory / "checkpoint", gain=gain)
            build_engine(directory / "checkpoint", directory / "engine", tensor_parallel=2)
            engines[kind] = directory / "checkpoint", directory / "engine"
        return engines[kind]

    return make


def chat(engine, *runs):
    """Runs the conversations; returns the counts of events. Every reply was right."""
    return json.loads(run_ranks(2, "tests.end_to_end.ranks_chatter", *engine, json.dumps(runs)))


@pytest.mark.slow
def test_two_ranks_reply_as_transformers(engine):
    """Grouped-query heads, one KV head a rank; pools so small that chunks swap and drop."""
    events = ("gpu", "host", "recomputed", "new", "dropped")
    chat(engine("llama"), dict(seed=1, turns=50, gpu_kv_chunks=29, slow=1, events=events))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "mixtral", "qwen3-moe", "gemma3", "gpt-oss", "opt"])
def test_two_ranks_reply_as_transformers_in_every_state(kind, engine):
    """Copies and steps delayed on all ranks, on one, on none; hosts of all sizes."""
    runs = [
        dict(seed=seed, turns=50, gpu_kv_chunks=29, disturbed=bool(seed % 2)) for seed in range(4)
    ]
    runs[0]["events"] = EVENTS
    runs += [
        dict(seed=7, turns=50, gpu_kv_chunks=29, host_kv_chunks=host, slow=1)
        for host in (0, 30, 200)
    ]
    runs += [dict(seed=8, turns=50, gpu_kv_chunks=29, slow=0, batching="separate")]
    runs += [dict(seed=11, turns=50, gpu_kv_chunks=29, slow=1, events=["suspended"], **TIGHT)]
    pools = dict(gpu_kv_chunks=29, host_kv_chunks=12, disk_kv_chunks=40)
    runs += [dict(seed=9 + n, turns=60, slow=n, events=["disk"], **pools) for n in (0, 1)]
    print(chat(engine(kind), *runs))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen3-5", "qwen3-5-moe", "qwen3-next"])
def test_two_ranks_with_states_reply_as_transformers(kind, engine):
    """Log probabilities are compared too."""
    sizes = dict(turns=50, within=1e-4)
    runs = [
        dict(seed=4 + slow, slow=slow, gpu_kv_chunks=60, host_kv_chunks=300, **sizes)
        for slow in (0, 1)
    ]
    runs[0]["events"] = EVENTS[:4]
    runs += [
        dict(seed=9, gpu_kv_chunks=29, host_kv_chunks=200, events=["suspended"], **sizes, **TIGHT)
    ]
    chat(engine(kind, gain=1.0), *runs)


DISK = dict(
    gpu_kv_chunks=29, host_kv_chunks=14, disk_kv_chunks=60, turns=80, restarts=5, events=["disk"]
)


@pytest.mark.slow
def test_two_ranks_reply_as_transformers_across_restarts(engine):
    """Spilling never stops; records that only some ranks have written are lost to all."""
    counts = chat(engine("llama"), dict(seed=20, **DISK), dict(seed=21, slow=1, **DISK))
    assert counts["restarted"] == 10, counts


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_one_rank_with_a_disk_that_lies(rank, engine):
    """Torn, flipped and misdirected records, refusals: records that one rank has lost are dropped
    on all."""
    counts = chat(engine("llama"), dict(seed=22 + rank, bad_disk=rank, **DISK))
    print(counts)
    assert counts["restarted"] == 5, counts
    assert any(counts[kind] for kind in ON_WRITE) and any(counts[kind] for kind in ON_READ)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_one_rank_whose_host_does_not_hold_everything(rank, engine):
    """A copy that failed on one rank is used on none."""
    run = dict(gpu_kv_chunks=27, turns=50, slow=1, failing_copies=rank, events=["host"])
    counts = chat(engine("llama"), dict(seed=30, **run), dict(seed=31, **run))
    assert counts["failed_copies"] > 20, counts


PROMPT = list(range(5, 25))


def ask(server, max_tokens, seconds=60):
    return server.post(
        "/v1/completions",
        seconds,
        model="engine",
        prompt=PROMPT,
        max_tokens=max_tokens,
        ignore_eos=True,
        return_token_ids=True,
    )


@pytest.mark.slow
def test_the_server_starts_its_ranks_and_ends_them(engine, tmp_path):
    """And drains: a reply that is being written when the signal comes is written to its end."""
    with Server(tmp_path, engine=engine("llama")[1]) as server:
        whole = ask(server, 40).json()["choices"][0]["token_ids"]
        assert len(whole) == 40
        body = {
            "model": "engine",
            "prompt": PROMPT,
            "max_tokens": 300,
            "stream": True,
            "ignore_eos": True,
        }
        with HTTP.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as reply:
            lines = reply.iter_lines()
            next(lines)
            server.process.send_signal(signal.SIGTERM)
            assert "data: [DONE]" in list(lines)
        assert server.process.wait(120) == 0


@pytest.mark.slow
def test_a_server_of_two_ranks_with_states_replies_as_one_rank(engine, tmp_path):
    """Also from states on HOST."""
    checkpoint, two = engine("qwen3-5-moe", gain=1.0)
    build_engine(checkpoint, tmp_path / "one")
    prompt = [5 + i % 150 for i in range(140)]
    sizes = dict(chunk_tokens=32, host_kv_chunks=400)
    options = [f"--{name.replace('_', '-')}={size}" for name, size in sizes.items()]
    params = SamplingParams(temperature=0.0, max_tokens=20, logprobs=0, ignore_eos=True)
    with (
        LLM(str(tmp_path / "one"), **sizes) as llm,
        Server(tmp_path, *options, engine=two) as server,
    ):
        for turn in range(2):
            body = dict(model="engine", prompt=prompt, max_tokens=20, temperature=0.0)
            body |= dict(logprobs=0, ignore_eos=True, return_token_ids=True)
            reply = server.post("/v1/completions", 60, **body).json()
            (choice,) = reply["choices"]
            (expected,) = llm.generate([prompt], params)
            (one,) = expected.outputs
            assert choice["token_ids"] == one.token_ids
            ours = choice["logprobs"]["token_logprobs"]
            pairs = zip(one.logprobs, one.token_ids, strict=True)
            theirs = [of[token].logprob for of, token in pairs]
            assert ours == pytest.approx(theirs, abs=1e-4)
            cached = reply["usage"]["prompt_tokens_details"]["cached_tokens"]
            assert cached == expected.usage.cached and (cached > 0) == (turn == 1)
            prompt = prompt + one.token_ids + [7]


@pytest.mark.slow
def test_ranks_say_where_their_threads_are_and_go_on(engine, tmp_path):
    """The signal goes to the launching process; mpirun sends it to rank 0's HTTP process too."""
    with Server(tmp_path, engine=engine("llama")[1]) as server:
        server.process.send_signal(signal.SIGUSR2)
        wait_for(lambda: any("in run_rank" in line for line in server.log))
        assert ask(server, 5).status_code == 200


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["raise", "kill", "hang", "stop"])
def test_a_rank_that_fails_ends_all(fault, engine, tmp_path):
    """Its message reaches the client and the log. A killed one has none: mpirun ends the others."""
    words = command(2, "tests.end_to_end.ranks_faults", fault)
    with Server(
        tmp_path, engine=engine("llama")[1], command=words, environment=variables(2)
    ) as server:
        if fault == "kill":
            with suppress(httpx.TransportError):  # unless rank 0 misses it before mpirun ends it
                assert ask(server, 40).status_code == 500
        else:
            message = (
                "ZeroDivisionError: rank 1 divides by zero" if fault == "raise" else "a rank hangs"
            )
            reply = ask(server, 40)
            assert reply.status_code == 500 and message in reply.text
        assert server.process.wait(120) != 0
    if fault != "kill":
        assert message in "\n".join(server.log)


@pytest.mark.slow
def test_rank_0_is_given_up_in_the_middle_of_a_step(engine, tmp_path):
    """The other ranks give it up; they have launched the step too. Whether it can still tell its
    client depends on mpirun."""
    words = command(2, "tests.end_to_end.ranks_faults", "leader")
    with Server(
        tmp_path, engine=engine("llama")[1], command=words, environment=variables(2)
    ) as server:
        with suppress(httpx.TransportError):
            assert ask(server, 40).status_code == 500
        assert server.process.wait(120) != 0
    assert any("no step is complete after 6 s: rank 0 hangs" in line for line in server.log)


@pytest.mark.slow
@pytest.mark.parametrize(
    "fault, status, message",
    [
        ("unset", 2, "pensieve serve: --disk-dir: cannot be used (rank 1)"),
        ("absent", 1, "ranks [1] have not come to the others after 10 s: a rank hangs"),
    ],
)
def test_a_rank_that_cannot_start_ends_all(fault, status, message, engine, tmp_path):
    words = command(2, "tests.end_to_end.ranks_faults", fault)
    server = Server(tmp_path, engine=engine("llama")[1], command=words, environment=variables(2))
    assert server.process.wait(120) == status
    server._reader.join(60)
    assert sum(message in line for line in server.log) == 1


@pytest.mark.slow
def test_a_server_that_still_starts_ends_when_it_is_told_to(engine, tmp_path):
    """Rank 0 waits for rank 1, which never comes."""
    words = command(2, "tests.end_to_end.ranks_faults", "late")
    server = Server(tmp_path, engine=engine("llama")[1], command=words, environment=variables(2))
    wait_for(lambda: "rank 1 loads for ever" in server.log)
    processes = descendants(server.process.pid)
    assert server.stop(signal.SIGUSR1) != 0
    wait_for(lambda: not any(map(running, processes)))


@pytest.mark.slow
def test_a_rank_that_does_not_end_is_given_up(engine, tmp_path):
    words = command(2, "tests.end_to_end.ranks_faults", "last")
    with Server(
        tmp_path, engine=engine("llama")[1], command=words, environment=variables(2)
    ) as server:
        assert server.stop(signal.SIGUSR1) != 0
    assert any("Timeout" in line for line in server.log)


@pytest.mark.slow
def test_no_rank_outlives_its_mpirun(engine, tmp_path):
    """No request is sent to rank 0, which would notice the end within a step."""
    with Server(tmp_path, engine=engine("llama")[1]) as server:
        mpirun, *others = descendants(server.process.pid)
        assert len(others) >= 3  # two ranks and the HTTP process
        os.kill(mpirun, signal.SIGKILL)
        assert server.process.wait(120) != 0
        wait_for(lambda: not any(map(running, others)))


@pytest.mark.slow
def test_ranks_that_are_too_few_are_told_how_many(engine, tmp_path):
    words = command(1, "pensieve.scripts.pensieve", "serve")
    server = Server(tmp_path, engine=engine("llama")[1], command=words, environment=variables(1))
    assert server.process.wait(120) == 2
    server._reader.join(60)
    assert any("2 ranks are needed and 1 were started: mpirun -n 2" in line for line in server.log)
