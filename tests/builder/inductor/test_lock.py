"""The lock of a build: one holder at a time, even if a holder dies."""

import multiprocessing
import os
import signal
import threading

from pensieve.builder.inductor.lock import locked


def hold(path, held, release):
    with locked(path, lambda: None):
        held.set()
        release.wait()


def test_others_wait_until_it_is_released_and_the_file_is_gone(tmp_path):
    path = tmp_path / "lock"
    order = []
    waiting = threading.Event()

    def second():
        with locked(path, waiting.set):
            order.append("second")

    with locked(path, lambda: None):
        thread = threading.Thread(target=second)
        thread.start()
        assert waiting.wait(60)
        order.append("first")
    thread.join(60)
    assert order == ["first", "second"] and not path.exists()


def test_many_threads_never_hold_it_together(tmp_path):
    inside, most = [], []

    def work():
        for _ in range(50):
            with locked(tmp_path / "lock", lambda: None):
                inside.append(1)
                most.append(len(inside))
                inside.pop()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert most == [1] * 200 and not (tmp_path / "lock").exists()


def test_a_killed_process_delays_no_other_build(tmp_path):
    context = multiprocessing.get_context("spawn")
    held, release = context.Event(), context.Event()
    process = context.Process(target=hold, args=(tmp_path / "lock", held, release))
    process.start()
    assert held.wait(60)
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert (tmp_path / "lock").exists()
    with locked(tmp_path / "lock", lambda: None):
        pass
    assert not (tmp_path / "lock").exists()


def test_an_error_inside_releases_it(tmp_path):
    for _ in range(2):
        try:
            with locked(tmp_path / "lock", lambda: None):
                raise KeyboardInterrupt
        except KeyboardInterrupt:
            pass
    assert not (tmp_path / "lock").exists()
