"""One thread a process: tests and the servers they start share few cores, and OpenMP's threads wait
for each other."""

import logging
import os
import signal
import sys

import pytest

os.environ["OMP_NUM_THREADS"] = "1"
# a shell ignores it for its background; children inherit that
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# They take longest, the slow tests among them counted in: `make test` begins with them, so that its
# two processes, which share the tests file by file, end together.
LONG_FILES = (
    "end_to_end/test_ranks.py",
    "end_to_end/test_histories.py",
    "end_to_end/test_first_start.py",
    "end_to_end/test_shared_histories.py",
    "ranks/test_mpi.py",
    "builder/test_fp8.py",
    "end_to_end/test_disk_server.py",
    "end_to_end/test_disk_ranks.py",
    "end_to_end/test_documented_commands.py",
    "end_to_end/test_exit_status.py",
    "end_to_end/test_triton_ranks.py",
    "scheduler/test_driver.py",
    "end_to_end/test_triton.py",
    "end_to_end/test_ui.py",
    "end_to_end/test_overflow.py",
    "runtime/test_grammar_replies.py",
    "end_to_end/test_kv_cache_dtype.py",
    "end_to_end/test_lower_tier.py",
    "end_to_end/test_identity.py",
    "end_to_end/test_disk_identity.py",
    "end_to_end/test_coding_agents.py",
    "end_to_end/test_server.py",
    "end_to_end/test_operations.py",
    "benchmarks/test_tiers.py",
    "measure/test_profile.py",
    "builder/test_engine_cache.py",
    "end_to_end/test_interrupts.py",
    "deploy/test_wheel.py",
    "end_to_end/test_agents.py",
    "conformance/test_serving.py",
    "inductor/test_compile.py",
    "plugins/test_in_the_interpreter.py",
    "benchmarks/test_serving.py",
    "end_to_end/test_clients.py",
    "ranks/test_launch.py",
    "benchmarks/test_ranks.py",
    "end_to_end/test_sampling.py",
    "end_to_end/test_output.py",
    "builder/test_shards.py",
    "builder/test_ranks.py",
    "http/test_connection_limits.py",
    "benchmarks/test_steps.py",
    "frontend/test_otel.py",
    "check/test_reuse.py",
    "runtime/test_llm.py",
)
_PLACES = {name: place for place, name in enumerate(LONG_FILES)}


def pytest_addoption(parser):
    """Options of tests that can use a running server: tests/conformance and tests/fuzz."""
    group = parser.getgroup("a running server")
    group.addoption(
        "--url", help="its address, as http://127.0.0.1:8000 (default: a server of the demo engine)"
    )
    group.addoption("--model", default="demo", help="the name that it serves (default %(default)s)")
    group.addoption("--api-key", metavar="KEY", help="where the server wants one")
    group = parser.getgroup("fuzzing, tests/fuzz and tests/end_to_end/test_shared_histories.py")
    group.addoption("--seconds", type=float, metavar="N", help="how long (default: a short while)")
    group.addoption(
        "--seed", type=int, default=7, metavar="N", help="of the cases (default %(default)s)"
    )
    group.addoption("--case", type=int, metavar="N", help="send this one only")
    group.addoption(
        "--pid",
        type=int,
        nargs="*",
        default=[],
        help="processes whose files and memory are watched",
    )


def pytest_collection_modifyitems(items):
    items.sort(
        key=lambda item: _PLACES.get(f"{item.path.parent.name}/{item.path.name}", len(_PLACES))
    )


@pytest.fixture(autouse=True)
def the_same_random_numbers_in_every_test():
    """Tests share processes by chance; their random numbers from torch must not depend on it."""
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)


@pytest.fixture(autouse=True)
def the_root_logger_as_pytest_set_it_up():
    """An earlier test may have configured logging: its handler writes to a stream that pytest has
    closed since."""
    root = logging.getLogger()
    root.handlers[:] = [
        handler for handler in root.handlers if type(handler) is not logging.StreamHandler
    ]
    root.setLevel(logging.WARNING)


@pytest.fixture(scope="session")
def postgres_server():
    """A PostgreSQL that runs; the test is skipped where there is none."""
    from .postgres import PrivatePostgres

    with PrivatePostgres() as server:
        yield server


@pytest.fixture
def postgres(postgres_server):
    """Its URL, with no tables of ours."""
    import psycopg

    with psycopg.connect(postgres_server.url, autocommit=True) as connection:
        connection.execute("DROP SCHEMA IF EXISTS pensieve CASCADE")
    return postgres_server.url


@pytest.fixture(params=["sqlite", "postgres"])
def histories_at(request):
    """Where histories are: each test runs with a file (in memory) and with PostgreSQL."""
    return ":memory:" if request.param == "sqlite" else request.getfixturevalue("postgres")
