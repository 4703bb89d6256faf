"""Threads keep the order of what they are given, and nothing that goes wrong in one is lost."""

import threading
import time

import pytest

from portlab_merge.pipeline import Behind, in_order


def test_results_come_in_the_order_of_the_items():
    def slow_when_even(n: int) -> int:
        time.sleep(0.002 * (n % 2 == 0))
        return n * n

    assert list(in_order(slow_when_even, range(50), threads=4)) == [n * n for n in range(50)]


def test_few_results_wait_for_a_slow_reader():
    started: list[int] = []
    results = in_order(lambda n: started.append(n), range(100), threads=2)
    next(results)
    time.sleep(0.05)
    assert len(started) <= 5
    results.close()


def test_calls_behind_keep_their_order_and_are_done_at_the_end():
    seen: list[int] = []
    with Behind(lambda n: (time.sleep(0.001), seen.append(n))) as later:
        for n in range(20):
            later(n)
    assert seen == list(range(20))


def test_a_call_behind_that_fails_is_heard_of():
    def fail(n: int) -> None:
        raise OSError(f"call {n}")

    with pytest.raises(OSError, match="call 0"), Behind(fail) as later:
        later(0)


def test_the_caller_waits_when_too_many_calls_are_due():
    gate, called = threading.Event(), []
    with Behind(lambda n: gate.wait(), limit=2) as later:
        caller = threading.Thread(target=lambda: [(later(n), called.append(n)) for n in range(6)])
        caller.start()
        time.sleep(0.05)
        assert len(called) == 2
        gate.set()
        caller.join()
    assert len(called) == 6
