"""Every command answers questions about itself at once, in one line where it is asked something
wrong."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from pensieve.scripts.pensieve import COMMANDS

HEAVY = {
    "torch",
    "numpy",
    "fastapi",
    "starlette",
    "uvicorn",
    "pydantic",
    "transformers",
    "tokenizers",
    "jinja2",
}
HEAVY |= {"pensieve.scheduler.scheduler"}
PROGRAMS = {
    "pensieve": ("pensieve.scripts.pensieve", ()),
    **{command: ("pensieve.scripts.pensieve", (command,)) for command in COMMANDS},
    "build_engine": ("pensieve.scripts.build_engine", ()),
}
PROBE = """
import importlib, sys
module, *words = sys.argv[1:]
try:
    status = importlib.import_module(module).main(words)
except SystemExit as ended:
    status = ended.code
print("imported:", *sys.modules, file=sys.stderr)
sys.exit(status)
"""
MOST_SECONDS = 3.0  # of a processor; about 0.1 are needed


def answer(program: str, *words: str) -> tuple[subprocess.CompletedProcess[str], set[str], float]:
    """Its output, the modules that it imported, and its processor seconds."""
    module, first = PROGRAMS[program]
    before = sum(os.times()[2:4])
    done = subprocess.run(
        [sys.executable, "-c", PROBE, module, *first, *words], capture_output=True, text=True
    )
    *lines, last = done.stderr.splitlines()
    done.stderr = "".join(f"{line}\n" for line in lines)
    assert last.startswith("imported:"), done.stderr
    return done, set(last.split()[1:]), sum(os.times()[2:4]) - before


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("word", ["--help", "--version", "--hlep"])
def test_questions_are_answered_at_once(program: str, word: str) -> None:
    """Without imports that take seconds."""
    done, imported, seconds = answer(program, word)
    assert not imported & HEAVY
    assert seconds < MOST_SECONDS
    print(f"{program} {word}: {seconds:.3f} s")
    if word == "--hlep":
        name = f"pensieve {program}" if program in COMMANDS else program
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.startswith(f"{name}: ") and done.stderr.count("\n") == 1
        assert "did you mean --help?" in done.stderr
    else:
        assert (done.returncode, done.stderr) == (0, "")
        assert ("usage: " if word == "--help" else "pensieve 0.") in done.stdout


def test_the_command_itself_imports_little() -> None:
    """Ctrl-C is one line only once the imports of its first modules are done."""
    assert "email" not in answer("pensieve", "--help")[1]  # importlib.metadata imports it


def test_an_unknown_command_is_answered_with_the_closest_one() -> None:
    done, imported, _ = answer("pensieve", "sevre")
    assert (done.returncode, done.stderr) == (
        2,
        "pensieve: there is no command sevre; did you mean serve?\n",
    )
    assert not imported & HEAVY
    assert "there is serve, chat," in answer("pensieve", "zzz")[0].stderr


def test_a_wrong_value_is_one_line() -> None:
    done, imported, _ = answer("serve", "demo", "--port", "high")
    assert (done.returncode, done.stderr) == (
        2,
        "pensieve serve: argument --port: invalid int value: 'high'\n",
    )
    assert not imported & HEAVY


def test_tensorrt_llms_names_of_options_are_known() -> None:
    from pensieve.scripts.build_engine import parser

    ours = parser().parse_args(["--checkpoint", "a", "--output", "b", "--tensor-parallel", "2"])
    assert (
        parser().parse_args(["--checkpoint_dir", "a", "--output_dir=b", "--tp_size", "2"]) == ours
    )


@pytest.mark.parametrize(
    ("theirs", "hint"),
    [
        ("--max_seq_len", "`pensieve serve` has --max-model-len"),
        ("--max_batch_size", "`pensieve serve` has --max-num-seqs"),
        ("--gemm_plugin", "there are no plugins to choose; leave it out"),
    ],
)
def test_other_options_of_tensorrt_llm_have_a_hint(
    theirs: str, hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from pensieve.scripts.build_engine import parser

    with pytest.raises(SystemExit):
        parser().parse_args(["--checkpoint_dir", "a", "--output_dir=b", theirs, "8"])
    assert capsys.readouterr().err == f"build_engine: there is no option {theirs}: {hint}\n"
