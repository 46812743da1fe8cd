"""Several replicas behind a router: one replica equals the simulator, and effects of routing and
failures can be counted."""

from dataclasses import replace

import pytest

from benchmarks.cluster_model import DETECTION_S, ROUTINGS, Cluster, ReplicaEvent
from pensieve.scheduler.sim.ring import fullest_share
from pensieve.scheduler.sim.simulator import Session, SessionTurn, simulate
from pensieve.scheduler.types import Usage
from tests.scheduler.sim.test_simulator import CONFIG, COST, QUICK, crowd

ROOMY = replace(CONFIG, gpu_kv_chunks=400, host_kv_chunks=400)  # nothing is evicted


def chats(count, turns=4, think_s=40.0):
    """Chats that are never at work together."""
    return [
        Session(
            f"s{number}",
            2.0 * number,
            tuple(SessionTurn(8 * turn, 4, 4, think_s) for turn in range(turns)),
        )
        for number in range(count)
    ]


@pytest.mark.parametrize("routing", ROUTINGS)
def test_one_replica_is_the_simulator(routing):
    sessions = crowd(shared=4)
    report = simulate(CONFIG, QUICK, sessions)
    one = Cluster(CONFIG, QUICK, sessions, 1, routing).run()
    assert (one.requests, one.usage, one.moved, one.retried) == (
        report.requests,
        report.usage,
        0,
        0,
    )
    assert (one.ttft_p50, one.ttft_p99) == pytest.approx((report.ttft_p50, report.ttft_p99))
    assert one.seconds_per_token == pytest.approx(report.seconds_per_token)


def test_a_session_stays_with_its_replica_and_its_cache():
    report = Cluster(ROOMY, QUICK, chats(6), 3, "session").run()
    assert report.requests == 24 and report.moved == 0 and report.hit_rate == 1.0


def test_random_routing_loses_what_other_replicas_have():
    report = Cluster(ROOMY, QUICK, chats(6), 3, "random", seed=1).run()
    assert report.moved > 6 and report.hit_rate < 0.8


def test_a_system_prompt_is_known_of_sessions_that_replicas_not_simulated_have_served():
    """At random: most turns at a simulated replica come after turns elsewhere."""
    turns = SessionTurn(0, 16, 4), *(SessionTurn(20 + 8 * turn, 4, 4, 40.0) for turn in range(5))
    sessions = [
        Session(f"s{number}", 2.0 * number, turns, system_tokens=12) for number in range(60)
    ]
    every, some = (
        Cluster(ROOMY, QUICK, sessions, 16, "random", simulated=n).run().hit_rate for n in (None, 4)
    )
    assert some == pytest.approx(every, abs=0.1)


@pytest.mark.parametrize("routing", ["random", "least-loaded"])
def test_a_part_of_an_overloaded_cluster_waits_as_long_as_the_whole(routing):
    turns = SessionTurn(0, 8, 4), *(SessionTurn(12 * turn, 8, 4, 2.0) for turn in range(1, 4))
    sessions = [Session(f"s{number}", number / 16, turns) for number in range(400)]
    every, some = (
        Cluster(CONFIG, QUICK, sessions, 16, routing, simulated=n).run(240.0) for n in (None, 4)
    )
    assert some.ttft_p50 == pytest.approx(every.ttft_p50, rel=0.15) and every.ttft_p50 > 20
    assert some.ttft_p95 == pytest.approx(every.ttft_p95, rel=0.15)


def test_the_least_loaded_replica_takes_the_next_request():
    together = [Session(f"s{number}", 0.0, (SessionTurn(0, 8, 8),)) for number in range(3)]
    alone = simulate(CONFIG, COST, together[:1])
    report = Cluster(ROOMY, COST, together, 3, "least-loaded").run()
    assert report.ttft_p99 == alone.ttft_p99 and report.busiest == pytest.approx(1.0)


def test_a_crowded_replica_sends_new_turns_elsewhere():
    """All sessions have the same home, which has more to do than it can."""
    ring = Cluster(ROOMY, COST, (), 4, "session")
    chosen = [session for session in chats(100, think_s=0.5) if ring.home(session.name) == 0][:16]
    sessions = [session._replace(start_s=0.1 * at) for at, session in enumerate(chosen)]
    waits = {
        routing: Cluster(ROOMY, COST, sessions, 4, routing).run()
        for routing in ("session", "session-then-load")
    }
    assert waits["session-then-load"].ttft_p50 < waits["session"].ttft_p50 / 2
    assert waits["session-then-load"].moved > waits["session"].moved == 0


def test_a_failure_loses_time_and_cache_but_no_request():
    sessions = chats(6)
    whole = Cluster(ROOMY, QUICK, sessions, 3, "session").run()
    failed = Cluster(
        ROOMY,
        QUICK,
        sessions,
        3,
        "session",
        events=[ReplicaEvent(45.0, 0, "fail"), ReplicaEvent(70.0, 0, "back")],
    ).run()
    assert failed.requests == whole.requests
    assert failed.moved > 0 and failed.hit_rate < 1.0


def test_a_request_cut_off_waits_until_the_failure_is_seen():
    session = Session("s0", 0.0, (SessionTurn(0, 8, 40),))
    home = Cluster(ROOMY, COST, (), 3, "session").home("s0")
    report = Cluster(
        ROOMY, COST, [session], 3, "session", events=[ReplicaEvent(1.0, home, "fail")]
    ).run()
    assert (report.requests, report.retried) == (1, 1)
    assert report.ttft_p50 > 1.0 + DETECTION_S


def test_a_drained_replica_finishes_what_it_has():
    session = Session("s0", 0.0, (SessionTurn(0, 8, 8), SessionTurn(16, 4, 4, think_s=5.0)))
    home = Cluster(ROOMY, COST, (), 2, "session").home("s0")
    report = Cluster(
        ROOMY, COST, [session], 2, "session", events=[ReplicaEvent(1.0, home, "drain")]
    ).run()
    assert (report.requests, report.retried, report.moved) == (2, 0, 1)


def test_some_replicas_stand_for_all():
    """Sessions that stay are served alike, however many of the replicas are simulated."""
    sessions = [session._replace(name=f"n{at}") for at, session in enumerate(chats(60))]
    every, some = (
        Cluster(ROOMY, QUICK, sessions, 8, "session", simulated=n).run() for n in (None, 4)
    )
    assert some.requests < every.requests
    assert some.hit_rate == every.hit_rate == 1.0


def test_warm_up_is_served_but_not_reported():
    report = Cluster(ROOMY, QUICK, chats(3), 2, "session", warm_up_s=41.0).run()
    assert 0 < report.requests < 12 and report.usage != Usage()


def test_the_fullest_share_is_that_of_the_replica_with_most_names():
    cluster = Cluster(ROOMY, QUICK, (), 4, "session")
    names = 20_000
    homes = [cluster.home(f"n{number}") for number in range(names)]
    most = max(homes.count(number) for number in range(4)) / names
    assert fullest_share(4) == pytest.approx(most, rel=0.03)
    assert fullest_share(1) == 1.0
