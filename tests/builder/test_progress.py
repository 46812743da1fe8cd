"""Progress on a terminal, and in the log elsewhere."""

import io
import logging
import sys

from pensieve.builder import progress as progress_module
from pensieve.builder.progress import GIB, Progress, show_progress


class Terminal(io.StringIO):
    def isatty(self):
        return True


def on_terminal(monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    return terminal


def test_a_bar_grows_on_a_terminal_and_ends_its_line(monkeypatch):
    terminal = on_terminal(monkeypatch)
    for done in (1, 2, 4):
        show_progress("pinning host memory", done, 4, " GiB")
    drawn = terminal.getvalue().split("\r")[1:]
    assert [one.count("#") for one in drawn] == [8, 15, 30]
    assert drawn[0].startswith("pinning host memory [########......") and drawn[0].endswith(
        "] 1 of 4 GiB "
    )
    assert drawn[-1].endswith("4 of 4 GiB \n") and "\n" not in "".join(drawn[:-1])


def test_nothing_is_drawn_elsewhere(monkeypatch):
    log = io.StringIO()
    monkeypatch.setattr(sys, "stderr", log)
    show_progress("capturing graphs", 1, 2)
    assert not log.getvalue()


def test_each_stage_has_its_line_on_a_terminal(monkeypatch):
    terminal = on_terminal(monkeypatch)
    monkeypatch.setattr(progress_module, "DRAW_SECONDS", 0)
    progress = Progress("llama")
    progress.say("writing the weights")
    progress.advance(GIB, 2 * GIB)
    progress.advance(2 * GIB, 2 * GIB)
    progress.say("compiling")
    progress.close()
    progress.close()
    first, second, rest = terminal.getvalue().split("\n")
    assert first.startswith("llama: writing the weights\rllama: writing the weights [###")
    assert first.endswith("2 of 2 GiB ") and (second, rest) == ("llama: compiling", "")


def test_a_bar_is_not_drawn_for_every_tensor(monkeypatch):
    terminal = on_terminal(monkeypatch)
    monkeypatch.setattr(progress_module, "DRAW_SECONDS", float("inf"))
    progress = Progress("llama")
    progress.say("writing")
    progress.advance(1, 4)
    progress.advance(4, 4)
    assert terminal.getvalue().count("[") == 1


def test_a_log_gets_a_line_every_so_often(caplog, monkeypatch):
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    progress = Progress("llama")
    with caplog.at_level(logging.INFO, "pensieve"):
        progress.say("writing the weights")
        progress.advance(1, 4)  # too soon for another line
        monkeypatch.setattr(progress_module, "LINE_SECONDS", 0)
        progress.advance(3, 4)
        progress.advance(4, 4)
    messages = [record.getMessage() for record in caplog.records]
    assert messages == ["llama: writing the weights", "llama: writing the weights, 75%"]
