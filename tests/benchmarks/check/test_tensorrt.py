"""check.tensorrt without a GPU: its commands exist, and one that fails does not stop the others."""

import sys

from benchmarks import engine
from benchmarks.check import ranks, reuse, tensorrt
from benchmarks.check.tensorrt import CheckPart
from pensieve.builder.build import build_random_engine
from pensieve.builder.manifest import Manifest
from pensieve.scripts import build_engine
from tests.end_to_end.triton_server import PACKAGES


def test_all_commands_have_options_that_exist(tmp_path):
    parsers = {
        "pensieve.scripts.build_engine": build_engine.parser,
        "benchmarks.check.ranks": ranks.parser,
        "benchmarks.check.reuse": reuse.parser,
        "benchmarks.engine": engine.parser,
    }
    modules = set()
    for part in tensorrt.parts(tmp_path):
        _, _, module, *words = part.command
        modules.add(module)
        if module in parsers:
            parsers[module]().parse_args(words)
    assert modules == {*parsers, "pytest"}
    assert all((tensorrt.ROOT / name).exists() for name in tensorrt.TESTS)


def test_small_engines_can_be_divided(tmp_path):
    for shape, own in tensorrt.SMALL.items():
        overrides = build_engine.overrides([*own, *tensorrt.BOTH])
        config = tensorrt.SHAPES / f"{shape}.json"
        build_random_engine(config, tmp_path / shape, overrides, tensor_parallel=2)
        assert Manifest.read(tmp_path / shape).head_dim == 64


def test_what_fails_is_told_at_the_end(capfd):
    def command(status):
        return sys.executable, "-c", f"print('part', {status}); raise SystemExit({status})"

    assert tensorrt.run_all(iter([CheckPart("one", command(3)), CheckPart("two", command(0))])) == 1
    lines = capfd.readouterr().out.splitlines()
    assert [line for line in lines if line.startswith("part")] == ["part 3", "part 0"]
    assert [line.split(" (")[0] for line in lines[-2:]] == ["FAIL one", "PASS two"]
    assert tensorrt.run_all(iter([CheckPart("two", command(0))])) == 0


def test_a_part_without_its_server_is_skipped_with_a_sentence(capfd):
    fails = (sys.executable, "-c", "raise SystemExit(1)")
    assert tensorrt.run_all(iter([CheckPart("three", fails, "no server in /here")])) == 0
    assert capfd.readouterr().out == "SKIP three: no server in /here\n"


def test_the_server_is_looked_for_where_the_tests_find_it():
    assert tensorrt.TRITON == PACKAGES
