"""The client's measurements of servers with known delays, of a real one, and of failing ones."""

import asyncio
import contextlib
import json
import re
import time
from array import array

import pytest

from benchmarks import clients as bench_clients
from benchmarks.clients import Client, Failed, Load, LoadTally, StreamedReply, Target, Window
from benchmarks.report import (
    json_line,
    milliseconds,
    read_records,
    read_reports,
    report,
    report_line,
    titles,
)
from benchmarks.serving import GPU_SECONDS, largest_rate, main, probe
from benchmarks.workload import Words
from pensieve.scheduler.sim.simulator import SessionTurn
from pensieve.scheduler.types import SettingError
from pensieve.scripts.simulation.arrivals import Arrival
from pensieve.scripts.simulation.traces import Dialogue, SyntheticTokens
from tests.benchmarks.fake_completions import CompletionsServer
from tests.end_to_end.server import Server

VLLM_FIELDS = {
    "model",
    "prompt",
    "max_tokens",
    "temperature",
    "ignore_eos",
    "stream",
    "stream_options",
    "return_token_ids",
}
FIRST, NEXT = 5, 4  # new tokens of the first and the second turn
REPLY = 11
TWO_TURNS = Dialogue(
    "a",
    None,
    (SessionTurn(0, FIRST, REPLY), SessionTurn(FIRST + REPLY, NEXT, REPLY, 0.05)),
    ((SyntheticTokens(FIRST),), (SyntheticTokens(NEXT),)),
)


def play(monkeypatch, arrivals, requests, *clients):
    """The clients' tallies, measured from the first moment until `requests` requests of each have
    ended or failed."""

    def ended(tally):
        return tally.completed + tally.errors.total() >= requests

    async def until(moment):
        while bench_clients.clock() < moment and not all(ended(each.tally) for each in clients):
            await asyncio.sleep(0.005)

    async def play_all():
        return await asyncio.gather(*(each.run(arrivals) for each in clients))

    monkeypatch.setattr(bench_clients, "_until", until)
    return asyncio.run(play_all())


def client(server, **target):
    return Client(
        Target(server.url, "fake", **target),
        Words(100, "salt"),
        Window(0.0, 60.0),
        bench_clients.clock(),
    )


@pytest.fixture
def bench(tmp_path, capsys):
    """Runs the command against a server; returns its JSON lines and its output."""
    rows = [
        {"conversation": "a", "turn": index, **turn._asdict()}
        for index, turn in enumerate(TWO_TURNS.turns)
    ]
    trace = tmp_path / "trace.jsonl"
    trace.write_text("\n".join(map(json.dumps, rows)))

    def run(server, *options, rate, measure_s):
        file = tmp_path / "out.json"
        fixed = [
            "--url",
            server.url,
            "--trace",
            str(trace),
            "--rate",
            rate,
            "--json",
            str(file),
            "--processes",
            "2",
        ]
        times = [
            "--warm-up-s",
            "0.3",
            "--measure-s",
            str(measure_s),
            "--expected-ms-per-token",
            "10",
        ]
        assert main([*fixed, *times, *options]) == 0
        return [json.loads(line) for line in file.read_text().splitlines()], capsys.readouterr()

    return run


LONGER = (1, 8, 40)  # multiples of a short time: on a busy machine no request may end in it


def everything_seen(line):
    """All that is looked at happened in the window, and the server was read on both sides of it."""
    times = line["ttft_ms_p50"], line["inter_token_ms_p50"]
    return (
        line["completed_per_s"] > 0
        and None not in times
        and sum((line["sources"] or {}).values()) > 0
    )


def test_known_delays_are_what_is_measured(bench):
    """A client process that gets no processor for longer than a gap finds several events at once:
    then gaps are longer too."""
    for times in LONGER:
        seconds, gap_ms = 1.5 * times, 20.0 * times
        with CompletionsServer(first_s=0.1, gap_s=gap_ms / 1e3) as server:
            (line,), output = bench(
                server, "--gpu-dollars-per-hour", "3600", rate="8", measure_s=seconds
            )
        if everything_seen(line) and line["inter_token_ms_p50"] >= 0.95 * gap_ms:
            break
    assert line["errors"] == {} and line["completed_per_s"] > 0
    assert 100 <= line["ttft_ms_p50"] < 5000
    assert 0.95 * gap_ms <= line["inter_token_ms_p50"] < gap_ms + 1000
    assert (100 + 10 * gap_ms) / REPLY <= line["ms_per_token_mean"] < gap_ms + 2000
    assert line["offered_per_s"] == pytest.approx(8 * 2)
    assert line["sources"]["new"] > 0 and line["cached_tokens"] == 3 * round(
        seconds * line["completed_per_s"]
    )
    # the server's counter does not change
    assert line["gpu_seconds"] == 0.0 and line["dollars"] == 0.0
    assert "new 100.0%" in output.out and "fake at http" in output.out
    assert all(set(body) == VLLM_FIELDS for body in server.bodies)


def test_a_turn_repeats_what_really_came(monkeypatch):
    with CompletionsServer() as server:
        dialogues = [TWO_TURNS._replace(name=f"d{index}") for index in range(10)]
        arrivals = [Arrival(index / 50, dialogue) for index, dialogue in enumerate(dialogues)]
        (tally,) = play(monkeypatch, arrivals, 20, client(server, conversations=True))
    assert (tally.sent, tally.completed, tally.cached_tokens, tally.open_at_end) == (20, 20, 60, 0)
    assert (
        tally.prompt_tokens == 10 * (2 * FIRST + REPLY + NEXT) and tally.output_tokens == 20 * REPLY
    )
    turns = {}
    for body in server.bodies:
        assert set(body) == VLLM_FIELDS | {"conversation"}
        turns.setdefault(body["conversation"], []).append(body["prompt"])
    for first, second in turns.values():
        assert (len(first), len(second)) == (FIRST, FIRST + REPLY + NEXT)
        assert second[: FIRST + REPLY] == [*first, *range(900, 900 + REPLY)]
    assert len({tuple(first) for first, _ in turns.values()}) == len(turns) == 10
    assert {turn: len(waits) for turn, waits in tally.waits.items()} == {
        "first": 10,
        "later": 10,
        "joined": 0,
    }
    assert tally.sessions == 10 and sorted(tally.session_seconds) == [
        f"0-d{index}" for index in range(10)
    ]
    assert min(tally.session_seconds.values()) > 0


def test_a_history_that_is_sent_is_not_measured(monkeypatch):
    with CompletionsServer() as server:
        arrivals = [
            Arrival(0.0, TWO_TURNS, index, 0, REPLY - 1, think_s=0.01) for index in range(4)
        ]
        (tally,) = play(monkeypatch, arrivals, 4, client(server))
    assert (tally.sent, tally.completed, tally.output_tokens) == (4, 4, 4 * REPLY)
    assert len(server.bodies) == 8
    assert sorted(body["max_tokens"] for body in server.bodies) == [1] * 4 + [REPLY] * 4
    assert tally.prompt_tokens == 4 * (FIRST + REPLY + NEXT)
    # the server has seen the histories, and a part of these conversations was not played
    assert [len(waits) for waits in tally.waits.values()] == [0, 4, 0] and tally.sessions == 4
    assert not tally.session_seconds


def test_the_first_request_in_the_middle_is_no_first_turn(monkeypatch):
    with CompletionsServer() as server:
        arrivals = [Arrival(0.0, TWO_TURNS, index, 1, 3) for index in range(4)]
        (tally,) = play(monkeypatch, arrivals, 4, client(server))
    assert [len(waits) for waits in tally.waits.values()] == [0, 0, 4] and tally.sessions == 4
    assert not tally.session_seconds


def test_a_wait_that_the_end_cuts_off_is_open(monkeypatch):
    with CompletionsServer(fail="silent", fail_after=0) as server:

        async def until(moment):
            while bench_clients.clock() < moment and len(server.bodies) < 3:
                await asyncio.sleep(0.005)

        monkeypatch.setattr(bench_clients, "_until", until)
        monkeypatch.setattr(bench_clients, "clock", lambda: 60.0 * until.ended)
        until.ended = False

        async def run():
            task = asyncio.create_task(client(server).run(arrivals))
            while len(server.bodies) < 3:
                await asyncio.sleep(0.005)
            until.ended = True
            return await task

        arrivals = [Arrival(0.0, TWO_TURNS, index) for index in range(3)]
        tally = asyncio.run(run())
        server.stopped.set()
    assert len(tally.open_waits["first"]) == tally.sessions == tally.open_at_end == 3
    assert tally.open_waits["first"] == [60.0] * 3
    assert tally.open_per_token == pytest.approx([60.0 / REPLY] * 3)
    assert not tally.errors and not tally.waits["first"]


def test_a_history_that_fails_is_counted(monkeypatch):
    with CompletionsServer(fail=429, fail_after=0) as server:
        arrivals = [
            Arrival(0.0, TWO_TURNS, index, 0, REPLY - 1, think_s=0.01) for index in range(4)
        ]
        (tally,) = play(monkeypatch, arrivals, 4, client(server))
    assert tally.errors == {"HTTP 429": 4} and tally.sent == 0


def test_failures_are_counted_by_kind_and_end_their_conversation(monkeypatch):
    kinds = {
        429: "HTTP 429",
        503: "HTTP 503",
        "drop": "short reply",
        "error": "error in the stream",
        "silent": "timeout",
        "short": "short reply",
    }
    with contextlib.ExitStack() as stack:
        servers = [
            stack.enter_context(CompletionsServer(fail=fail, fail_after=0)) for fail in kinds
        ]
        arrivals = [Arrival(0.0, TWO_TURNS, index) for index in range(4)]
        clients = [
            client(server, timeout_s=0.3 if server.fail == "silent" else 60.0) for server in servers
        ]
        tallies = play(monkeypatch, arrivals, 4, *clients)
        for server in servers:
            server.stopped.set()
    for kind, tally in zip(kinds.values(), tallies, strict=True):
        assert tally.errors == {kind: 4} and (tally.sent, tally.completed, tally.open_at_end) == (
            4,
            0,
            0,
        )


def test_a_server_that_dies_is_counted_and_ends_nothing():
    dialogue = Dialogue("d", None, (SessionTurn(0, 5, 400),), ((SyntheticTokens(5),),))
    for times in LONGER:  # a late client finds no server, or one that still listens too late
        arrivals = [Arrival(times * index / 20, dialogue, index) for index in range(20)]
        window = Window(0.0, times * 2.0)
        with (
            CompletionsServer(gap_s=times * 0.01) as server,
            Load(Target(server.url, "fake"), arrivals, Words(100, "x"), window, 2) as load,
        ):
            time.sleep(max(0.0, load.start + times * 0.5 - bench_clients.clock()))
            server.shutdown()
            server.server_close()  # closes the listening socket; open connections continue
            tally = load.result()
        if tally.sent == 20 and min(tally.errors["cannot connect"], tally.open_at_end) > 3:
            break
    assert tally.errors["cannot connect"] > 3
    # the latter: it was about to be accepted
    assert set(tally.errors) <= {"cannot connect", "connection lost"}
    assert tally.sent == 20 and tally.open_at_end > 3
    assert 0 < tally.busy < 2


def test_a_lost_client_process_is_told():
    with (
        CompletionsServer() as server,
        Load(Target(server.url, "fake"), [], Words(9, "x"), Window(0, 9), 2) as load,
    ):
        load._workers[1].kill()
        load._workers[1].join()
        with pytest.raises(ChildProcessError, match="has died"):
            bench_clients._receive(load._pipes[1], 5)
    assert not any(worker.is_alive() for worker in load._workers)


def test_servers_without_token_ids_need_a_tokenizer():
    with CompletionsServer(ids=False) as server, pytest.raises(SettingError, match="--tokenizer"):
        asyncio.run(probe(Target(server.url, "fake"), 100))
    reply = StreamedReply()
    events = [{"choices": [{"text": text}]} for text in ("a", "", "bc")] + [
        {"choices": [], "usage": {"completion_tokens": 4}}
    ]
    assert reply.read(
        "".join(f"data: {json.dumps(event)}\r\n\r\n" for event in events).encode()
    ) == [1, 1]
    assert reply.length == 4 and reply.token_ids(lambda text: [ord(letter) for letter in text]) == [
        97,
        98,
        99,
    ]


def test_events_are_read_however_they_are_cut():
    ids = [[1], [2, 3], []]
    stream = "".join(
        f'data: {{"choices":[{{"text":"","token_ids":{each}}}],"usage":null}}\n\n' for each in ids
    )
    stream += (
        "data: "
        '{"choices":[],"usage":{"completion_tokens":3,"prompt_tokens_details":null}}\n\ndata: '
        "[DONE]\n\n"
    )
    for size in (1, 7, 1000):
        reply = StreamedReply()
        brought = [
            count
            for at in range(0, len(stream), size)
            for count in reply.read(stream[at : at + size].encode())
        ]
        assert (brought, reply.ids, reply.length, reply.cached) == ([1, 2], [1, 2, 3], 3, None)
    with pytest.raises(Failed, match="malformed"):
        StreamedReply().read(b"data: {oops\n")


def test_percentiles_are_values_that_were_measured():
    assert milliseconds([0.004, 0.001, 0.003, 0.002], 0.5) == 2.0
    assert milliseconds([index / 1e3 for index in range(1, 101)], 0.99) == 99.0
    assert milliseconds([], 0.5) is None
    ramp = report(
        tally(first_token=array("d", (i / 1e3 for i in range(1, 101)))), rate=1, turns=1, seconds=1
    )
    assert (ramp.ttft_ms_p90, ramp.ttft_ms_p95, ramp.ttft_ms_p99) == (90.0, 95.0, 99.0)


def tally(**changed):
    counts = LoadTally(
        sent=30, completed=20, prompt_tokens=5000, output_tokens=400, open_at_start=2, open_at_end=9
    )
    counts.first_token.extend([0.05, 0.15])
    counts.per_token.extend([0.01, 0.03])
    counts.gaps.extend([0.008, 0.012])
    for name, value in changed.items():
        setattr(counts, name, value)
    return counts


def test_a_report_adds_up():
    whole = tally()
    whole.add(tally(busy=0.5))
    rate_report = report(whole, rate=1.5, turns=4.0, seconds=10.0, dollars_per_hour=7.2)
    assert (rate_report.offered_per_s, rate_report.sent_per_s, rate_report.completed_per_s) == (
        6.0,
        6.0,
        4.0,
    )
    assert (rate_report.output_tokens_per_s, rate_report.prompt_tokens_per_s) == (80.0, 1000.0)
    assert (
        rate_report.ms_per_token_mean == pytest.approx(20.0)
        and rate_report.ms_per_token_p90 == 30.0
    )
    assert (rate_report.ttft_ms_p50, rate_report.ttft_ms_p99, rate_report.inter_token_ms_p50) == (
        50.0,
        150.0,
        8.0,
    )
    assert (rate_report.open_at_start, rate_report.open_at_end, rate_report.client_busy) == (
        4,
        18,
        0.5,
    )
    # all the time: the server does not tell
    assert (rate_report.gpu_seconds, rate_report.dollars) == (10.0, pytest.approx(0.02))
    assert rate_report.dollars_per_million_output_tokens == pytest.approx(25.0)
    assert (
        report(whole, rate=1, turns=1, seconds=1, gpu_seconds=4.0, dollars_per_hour=3600).dollars
        == 4.0
    )


def test_lines_are_aligned_and_say_what_is_missing():
    rich = report(
        tally(num_cache_reports=20, cached_tokens=4000), rate=1.5, turns=4.0, seconds=10.0
    )
    assert "cached 80.0%" in report_line(rich)
    sources = {"gpu": 75, "host": 25, "disk": 0, "recomputed": 0, "new": 0}
    assert "gpu 75.0%, host 25.0%" in report_line(
        report(tally(), rate=2, turns=4, seconds=10, sources=sources)
    )
    empty = LoadTally()
    empty.errors["HTTP 429"] = 7
    poor = report(empty, rate=12.25, turns=4.0, seconds=10.0)
    assert report_line(poor).endswith("sources unknown; HTTP 429: 7") and poor.failed_share == 1.0
    places = [
        [word.end() for word in re.finditer(r"\S+", line)][12]
        for line in (report_line(rich), report_line(poor))
    ]
    assert len(set(places)) == 1 and titles().index("open") > places[0]


def test_reports_are_written_read_compared_and_drawn(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    files = []
    for name in ("ours", "theirs"):
        reports = [report(tally(), rate=rate, turns=4.0, seconds=10.0) for rate in (1.0, 2.0)]
        file = tmp_path / f"{name}.json"
        file.write_text("".join(json_line(each, {"model": name}) + "\n" for each in reports))
        assert read_reports(file, "--compare") == reports
        files.append(str(file))
    picture = tmp_path / "both.png"
    assert main(["--compare", *files, "--plot", str(picture)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert capsys.readouterr().out.count("\n") == 2 * 4


@pytest.mark.parametrize(
    ("limit", "expected"), [(3.3, "3.3"), (0.5, "below 1"), (9.0, "8 conversations/s or more")]
)
def test_the_largest_rate_is_found_by_halving(limit, expected):
    tried = []
    largest = largest_rate(lambda rate: tried.append(rate) or rate <= limit, 1.0, 8.0)
    assert len(tried) <= 9
    if expected == "3.3":
        assert limit / 1.05 <= float(largest.split()[0]) <= limit
    else:
        assert expected in largest


@pytest.mark.slow
def test_a_search_stops_at_what_is_asked(bench):
    with CompletionsServer() as server:
        for times in LONGER:
            lines, output = bench(server, "--find-rate", "1000", rate="9,20", measure_s=0.5 * times)
            if all(each["completed_per_s"] > 0 for each in lines):
                break
        assert [each["rate"] for each in lines] == [
            9.0,
            20.0,
        ] and "20 conversations/s or more" in output.out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--rate", "1,x"], "--rate: '1,x' is not a list of numbers"),
        (["--rate", "0"], "--rate: must be above 0"),
        (["--rate", "2", "--find-rate", "20"], "--rate: two rates LOW,HIGH"),
        (["--processes", "0"], "--processes: must be above 0"),
        (["--measure-s", "nan"], "--measure-s: must be above 0"),
        (["--warm-up-s", "-1"], "--warm-up-s: must be at least 0, not -1.0"),
        (["--trace", "nowhere.jsonl"], "--trace: nowhere.jsonl cannot be read"),
        (
            ["--trace", "x", "--turn-counts", "uniform"],
            "--turn-counts: is of synthetic conversations",
        ),
        (["--tokenizer", "nowhere.json"], "--tokenizer: there is no file"),
        (["--model", "other"], "--model: 'other' is not one of the server's: fake"),
        (["--json", "/nowhere/out.json"], "--json: there is no directory /nowhere"),
        (["--max-context", "1"], "--max-context: no conversation fits"),
        (["--url", "http://127.0.0.1:9"], "--url: http://127.0.0.1:9/v1/models does not answer"),
        (["--compare", "nowhere.json"], "--compare: nowhere.json cannot be read"),
    ],
)
def test_a_wrong_setting_is_named(capsys, options, message):
    with CompletionsServer() as server:
        assert main(["--url", server.url, *options]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "option",
    [
        ["--ramp-s", "1"],
        ["--from-empty"],
        ["--send-histories"],
        ["--expected-ms-per-token", "20"],
    ],
    ids=lambda option: option[0],
)
def test_a_setting_of_the_start_is_refused_with_a_trace_that_has_its_own_clock(
    tmp_path, capsys, option
):
    trace = tmp_path / "mooncake.jsonl"
    request = {"input_length": 9, "output_length": 2, "hash_ids": [0]}
    lines = [json.dumps({"timestamp": 1000 * second, **request}) for second in range(300)]
    trace.write_text("\n".join(lines))
    with CompletionsServer() as server:
        words = ["--url", server.url, "--trace", str(trace), "--warm-up-s", "0", "--measure-s", "1"]
        assert main([*words, *option]) == 2
    assert f"{option[0]}: leave it out: the trace has its own clock" in capsys.readouterr().err


def test_a_server_that_refuses_is_told_before_the_run(capsys):
    with CompletionsServer(fail=503, fail_after=0) as server:
        assert main(["--url", server.url]) == 2
    assert "--url: a request gets HTTP 503" in capsys.readouterr().err


@pytest.mark.slow
def test_a_real_server_tells_its_sources(bench, tmp_path):
    with Server(tmp_path / "state") as server:
        for times in LONGER:
            options = ("--conversations", "--vocabulary", "2000")
            (*_, line), output = bench(server, *options, rate="3", measure_s=1.5 * times)
            if everything_seen(line):
                break
    assert line["errors"] == {} and line["completed_per_s"] > 0 and line["model"] == "demo"
    assert (
        set(line["sources"]) == {"gpu", "host", "disk", "shared", "recomputed", "new"}
        and sum(line["sources"].values()) > 0
    )
    assert line["ttft_ms_p50"] > 0 and line["cached_tokens"] is not None
    assert GPU_SECONDS not in output.out


def test_records_are_read_and_a_wrong_line_is_named(tmp_path):
    file = tmp_path / "found.jsonl"
    file.write_text('{"rate": 2}\n{"rate": 3}\n')
    assert read_records(file, "--compare", "bench", lambda row: row["rate"]) == [2, 3]
    file.write_text('{"rate": 2}\n{}\n')
    with pytest.raises(
        SettingError, match=r"--compare: .*found\.jsonl, line 2: not a line of bench: KeyError"
    ):
        read_records(file, "--compare", "bench", lambda row: row["rate"])
    file.write_text("")
    with pytest.raises(SettingError, match="holds no results"):
        read_records(file, "--compare", "bench", dict)
