"""Each guard marks what it is for and nothing else."""

import pytest
from bench_records import cell, figures, record

from portlab_bench.guards import Expected, check, check_anchors

GOOD = Expected(shared=0.5, fixed=True)


def marked(found) -> set[str]:
    return {finding.guard for finding in found if not finding.ok}


def test_a_sound_cell_is_not_marked():
    assert marked(check(figures(), GOOD)) == set()


def test_nothing_answered():
    assert marked(check(None, GOOD)) == {"answers"}


@pytest.mark.parametrize(
    ("changed", "guard"),
    [
        ({"outcomes": {"ok": 97, "timeout": 3}}, "failures"),
        ({"client_load": 0.95}, "client"),
        ({"prefix_hits": 0.7}, "prefix cache"),
        ({"tokens_from": {"usage": 99, "chunks": 1}}, "token count"),
    ],
)
def test_a_fault_is_marked(changed, guard):
    assert marked(check(figures().model_copy(update=changed), GOOD)) == {guard}


@pytest.mark.parametrize(("outcomes", "ok"), [({"ok": 99, "timeout": 1}, True), ({"ok": 98, "empty": 2}, False)])
def test_one_failure_in_a_hundred_is_let_pass(outcomes, ok):
    found = check(figures().model_copy(update={"outcomes": outcomes}), GOOD)
    assert (marked(found) == set()) is ok


def test_sending_late_is_marked_by_its_share_of_the_time_to_first_token():
    late = [record(i, sent=i + 0.02, scheduled=float(i), chunks=(i + 0.12, i + 0.2)) for i in range(100)]
    assert marked(check(figures(late), GOOD)) == {"lag"}
    slow = [record(i, sent=i + 0.02, scheduled=float(i), chunks=(i + 2.12, i + 2.2)) for i in range(100)]
    assert marked(check(figures(slow), GOOD)) == set()  # 20 ms of 2 s


def test_answers_that_run_to_the_limit_are_marked_unless_their_length_was_ordered():
    f = figures().model_copy(update={"finishes": {"length": 10, "stop": 90}})
    assert marked(check(f, GOOD)) == set()
    assert marked(check(f, Expected(shared=0.5, fixed=False))) == {"finish reasons"}
    assert marked(check(f.model_copy(update={"finishes": {"length": 5, "stop": 95}}), Expected(0.5, False))) == set()


def test_figures_above_the_peak_are_marked():
    f = figures().model_copy(update={"prompt_throughput": 900.0, "output_throughput": 60.0, "prefix_hits": 0.0})
    assert marked(check(f, Expected(0.5, True, (1000.0, 1000.0)))) == set()
    assert marked(check(f, Expected(0.5, True, (1000.0, 100.0)))) == {"roofline"}
    # What the prefix cache held was not computed.
    cached = f.model_copy(update={"prompt_throughput": 1800.0, "prefix_hits": 0.5})
    assert marked(check(cached, Expected(0.5, True, (1000.0, 1000.0)))) == set()


def test_an_anchor_that_departs_marks_every_cell():
    def cells(later: float):
        first = [record(i, sent=float(i), chunks=(i + 0.1, i + 0.2)) for i in range(200)]
        again = [record(i, sent=float(i), chunks=(i + later, i + later + 0.1)) for i in range(200)]
        return check_anchors([cell("a", figures(first)), cell("b", figures(first)), cell("a", figures(again), True)])

    assert all(found.valid for found in cells(0.105))
    assert not any(found.valid for found in cells(0.2))


def test_an_anchor_too_small_to_tell_marks_nothing_that_is_near():
    near = [record(0, sent=0.0, chunks=(0.1, 0.2))], [record(0, sent=0.0, chunks=(0.105, 0.205))]
    found = check_anchors([cell("a", figures(near[0])), cell("a", figures(near[1]), True)])
    assert all(c.valid for c in found)
