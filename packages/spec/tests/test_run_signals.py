"""Signals that ask a run to leave: one process by itself, several in agreement."""

import os
import signal
import threading

import pytest

from portlab_spec import cli
from portlab_spec.run.signals import Preempted, Preemption


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGUSR1, 138)])
def test_a_signal_asks_to_leave_after_the_step(number, code, capsys):
    def main(_):
        with Preemption() as preemption:
            assert not preemption.due(6)
            os.kill(os.getpid(), number)
            assert preemption.due(7)
            raise preemption.leave(7)

    with pytest.raises(SystemExit) as end:
        cli.run("train-jax", main, [])
    assert end.value.code == code
    line = f"train-jax: error: stopped by {number.name} after step 7, which is saved. Run the same command to go on\n"
    assert capsys.readouterr().err == line


def test_a_second_signal_finds_the_handler_from_before():
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        mine = signal.getsignal(signal.SIGTERM)
        with Preemption():
            os.kill(os.getpid(), signal.SIGTERM)
            assert signal.getsignal(signal.SIGTERM) is mine
        assert signal.getsignal(signal.SIGTERM) is mine
    finally:
        signal.signal(signal.SIGTERM, before)


def test_handlers_are_put_back():
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGUSR1)
    with Preemption():
        assert signal.getsignal(signal.SIGTERM) is not before[0]
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGUSR1)) == before


def test_another_thread_may_train_and_is_not_interrupted():
    seen = []

    def train():
        with Preemption() as preemption:
            seen.append(preemption.due(1))

    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
    assert seen == [False]


def test_preempted_is_no_failed_check():
    assert Preempted(signal.SIGTERM, 3).exit_code not in (0, 1, 2, 130)


def test_several_processes_leave_when_they_agree():
    asked = []

    def agree(step):
        asked.append(step)
        return step == 2

    with Preemption(agree) as preemption:
        assert [preemption.due(step) for step in (1, 2)] == [False, True]
        assert str(preemption.leave(2)).startswith("stopped by SIGTERM after step 2")
    assert asked == [1, 2]


def test_who_agrees_listens_for_itself():
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGUSR1)
    with Preemption(lambda step: False):
        assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGUSR1)) == before
