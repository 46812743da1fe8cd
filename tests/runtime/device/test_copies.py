import pytest

from pensieve.runtime.counters import KVCounters
from pensieve.runtime.device.copies import Transfers
from pensieve.runtime.device.protocol import Ticket
from pensieve.scheduler.plan import Lane, Tickets
from pensieve.scheduler.types import InvariantError

from ..fake_engine import copy, plan


class NullTicket(Ticket):
    def __init__(self, lane: Lane, number: int):
        self.lane = lane
        self.number = number


class NullDevice:
    """Records its calls; a lane's work is done when the test says so."""

    def __init__(self):
        self.calls = []
        self.marks = dict.fromkeys(Lane, 0)
        self.done = dict.fromkeys(Lane, 0)

    def copy(self, lane, sources, targets, layers):
        self.calls.append(("copy", lane, sources.tolist(), targets.tolist(), layers))

    def mark(self, lane, gate=None):
        self.marks[lane] += 1
        self.calls.append(("mark", lane, gate))
        return NullTicket(lane, self.marks[lane])

    def wait(self, lane, ticket):
        self.calls.append(("wait", lane, ticket.lane, ticket.number))

    def ready(self, ticket):
        return ticket.number <= self.done[ticket.lane]


@pytest.fixture
def device():
    return NullDevice()


@pytest.fixture
def transfers(device):
    return Transfers(device, layers=5, group_layers=2, chunk_bytes=100)


def step(transfers: Transfers, device: NullDevice, number: int) -> None:
    """A step without copies."""
    transfers.issue(plan(number))
    transfers.launched(number, device.mark(Lane.COMPUTE))


def test_whole_records_out_and_ungated_in(transfers, device):
    transfers.issue(plan(1, copies=[copy(Lane.OUT, 1, {3: 8, 4: 9}), copy(Lane.IN, 1, {5: 6})]))
    assert device.calls == [
        ("copy", Lane.OUT, [3, 4], [8, 9], range(5)),
        ("mark", Lane.OUT, None),
        ("copy", Lane.IN, [5], [6], range(5)),
        ("mark", Lane.IN, None),
    ]
    assert transfers.copied_bytes == KVCounters(swap_in=100, swap_out=200)


def test_swap_outs_are_looked_at_once_they_are_complete(device):
    """Each record once, with the ticket that confirms it."""
    looked = []
    transfers = Transfers(
        device, 5, 2, 100, is_exact=lambda slot: looked.append(slot) or slot % 2 == 0
    )
    transfers.issue(
        plan(
            1,
            copies=[
                copy(Lane.OUT, 1, {3: 8, 4: 9}),
                copy(Lane.IN, 1, {5: 6}),
                copy(Lane.OUT, 2, {1: 7}),
            ],
        )
    )
    assert transfers.completed().swap_out == 0 and transfers.bad_copies() == () and looked == []
    device.done[Lane.OUT] = 1
    assert (
        transfers.completed().swap_out == 1 and transfers.bad_copies() == (9,) and looked == [8, 9]
    )
    device.done[Lane.OUT] = 2
    assert (
        transfers.completed().swap_out == 2
        and transfers.bad_copies() == (7,)
        and transfers.bad_copies() == ()
    )


def test_a_gated_swap_in_opens_a_gate_behind_each_group(transfers, device):
    transfers.issue(plan(1, copies=[copy(Lane.IN, 1, {5: 6}, gated=True)]))
    assert transfers.gates == (0, 2, 4)
    groups = [range(2), range(2, 4), range(4, 5)]
    assert device.calls == [
        call
        for group in groups
        for call in (("copy", Lane.IN, [5], [6], group), ("mark", Lane.IN, group.start))
    ]
    # Its plan ticket is the last group's.
    device.done[Lane.IN] = 2
    assert transfers.completed().swap_in == 0
    device.done[Lane.IN] = 3
    assert transfers.completed().swap_in == 1


def test_a_lane_waits_for_the_others_only_and_not_for_what_is_complete(transfers, device):
    for number in (1, 2):
        step(transfers, device, number)
    transfers.issue(
        plan(3, copies=[copy(Lane.OUT, 1, {0: 0}, Tickets(2, 0, 0)), copy(Lane.IN, 1, {1: 1})])
    )
    device.calls.clear()
    device.done[Lane.COMPUTE] = 1
    assert transfers.completed() == Tickets(1, 0, 0)

    transfers.issue(plan(4, copies=[copy(Lane.OUT, 2, {0: 0}, Tickets(1, 1, 1))]))
    assert [call for call in device.calls if call[0] == "wait"] == [("wait", Lane.OUT, Lane.IN, 1)]
    device.calls.clear()
    transfers.hold_step(plan(4, after=Tickets(2, 1, 2)))
    assert device.calls == [("wait", Lane.COMPUTE, Lane.IN, 1), ("wait", Lane.COMPUTE, Lane.OUT, 2)]


def test_hazard_gate_not_yet_recorded(transfers, device):
    """A step that runs before its gates are marked would pass them at once and read slots that are
    not filled."""
    step(transfers, device, 1)
    gated = plan(2, copies=[copy(Lane.IN, 1, {0: 0}, gated=True)])
    with pytest.raises(
        InvariantError, match="step 2 would be launched before its gates are marked"
    ):
        transfers.hold_step(gated)
    transfers.issue(gated)
    transfers.hold_step(gated)


def test_a_step_never_launched_is_complete_with_the_one_before(transfers, device):
    step(transfers, device, 1)
    step(transfers, device, 4)
    transfers.issue(plan(5, copies=[copy(Lane.OUT, 1, {0: 0}, Tickets(3, 0, 0))]))
    assert ("wait", Lane.OUT, Lane.COMPUTE, 1) in device.calls


def waits(device: NullDevice) -> list[tuple]:
    return [call[1:] for call in device.calls if call[0] == "wait"]


def test_with_in_first_copies_ahead_of_time_wait_for_the_swap_ins_before_them(device):
    transfers = Transfers(device, layers=5, group_layers=5, chunk_bytes=100, in_first=True)
    ahead, behind = copy(Lane.OUT, 1, {0: 0}), copy(Lane.OUT, 2, {1: 1})
    transfers.issue(plan(1, copies=[ahead, copy(Lane.IN, 1, {5: 6}), behind]))
    assert waits(device) == [(Lane.OUT, Lane.IN, 1)], "only the one behind the swap-in"
    device.calls.clear()
    device.done[Lane.IN] = 1
    transfers.completed()
    transfers.issue(plan(2, copies=[copy(Lane.OUT, 3, {2: 2})]))
    assert not waits(device), "the swap-in is done"


def test_with_in_first_evictions_wait_for_nothing_more(device):
    """Evictions that the step, or a swap-in of the same plan, needs."""
    transfers = Transfers(device, layers=5, group_layers=5, chunk_bytes=100, in_first=True)
    transfers.issue(plan(1, copies=[copy(Lane.IN, 1, {5: 6})]))
    transfers.issue(plan(2, copies=[copy(Lane.OUT, 1, {0: 0})], after=Tickets(0, 0, 1)))
    assert not waits(device)
    transfers.issue(
        plan(3, copies=[copy(Lane.OUT, 2, {0: 0}), copy(Lane.IN, 2, {3: 0}, Tickets(0, 0, 2))])
    )
    assert waits(device) == [(Lane.IN, Lane.OUT, 2)]


@pytest.mark.parametrize(
    ("copies", "message"),
    [
        (
            [copy(Lane.OUT, 1, {0: 0}, Tickets(1, 0, 0))],
            "ticket 1 on lane COMPUTE is waited for before it is issued",
        ),
        (
            [copy(Lane.IN, 1, {0: 0}), copy(Lane.IN, 1, {1: 1})],
            "ticket 1 on lane IN comes after ticket 1",
        ),
        ([copy(Lane.IN, t, {t: t}, gated=True) for t in (1, 2)], "more than one gated batch"),
        ([copy(Lane.OUT, 1, {0: 0}, gated=True)], "only a swap-in can be gated"),
    ],
)
def test_copies_out_of_order_are_refused(transfers, copies, message):
    with pytest.raises(InvariantError, match=message):
        transfers.issue(plan(1, copies=copies))
