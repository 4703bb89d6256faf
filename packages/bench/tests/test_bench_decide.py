"""Decisions: volumes, copies, break-even, what is left out, and the paper's arithmetic."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import tyro
from hypothesis import given, settings
from hypothesis import strategies as st

from portlab_bench import paper
from portlab_bench.commands_table import DecideCommand, TableCommand, parse_count, parse_seconds, run_decide
from portlab_bench.decide import DAY, MONTH, Question, break_even, decide, model_error, serve_option
from portlab_bench.evidence import Figure
from portlab_bench.machines import parse_machine
from portlab_bench.serve_rows import serve_row
from portlab_bench.train_cost import train_row
from portlab_spec.errors import UserError

MACHINES = [parse_machine(name) for name in ("v5p-8", "v6e-8", "2xH100")]


RESULTS = Path(__file__).parents[3] / "bench" / "results"


def usd(value: float) -> Figure:
    return Figure(value=value, unit="USD/h", evidence="published", record="r", date="2026-01-01")


def option(machine: str, hour: float, throughput: float, question: Question):  # type: ignore[no-untyped-def]
    row = serve_row(parse_machine(machine), question.work)
    assert row.point
    point = replace(row.point, output_throughput=throughput)
    return serve_option(question, replace(row, point=point), usd(hour))


def test_copies_and_cost_by_hand() -> None:
    question = Question(tokens_per_day=100e6, utilisation=0.5)
    found = option("v6e-8", 10.0, 1000.0, question)
    # 1,000 tokens/s at half load are 43.2 million a day: three copies.
    assert found.copies == 3
    assert found.day.value == 3 * 240
    assert found.month.value == 3 * 10 * 730
    assert found.load == pytest.approx(100e6 / (3 * 86.4e6))
    assert found.million.value == pytest.approx(720 / 100)
    assert found.day.evidence == "modelled"


def test_one_copy_is_always_paid_for() -> None:
    assert option("v6e-8", 10.0, 1000.0, Question(tokens_per_day=1)).copies == 1


def test_break_even_by_hand() -> None:
    question = Question(tokens_per_day=10e6, utilisation=1.0)
    small, large = option("2xH100", 10.0, 100.0, question), option("v6e-8", 25.0, 400.0, question)
    # small bears 8.64 million a day a copy at 10, large 34.56 at 25: large wins from the third copy of small on, and
    # its second copy (50) is cheaper than six of small (60) but no cheaper than five (50).
    found = break_even(small, large, question, 8)
    assert found.first == pytest.approx(2 * 8.64e6)
    assert found.always == pytest.approx(5 * 8.64e6)
    never = break_even(large, replace_hour(small, 100.0), question, 2)
    assert (never.first, never.always) == (None, None)
    assert found.chip_price * 8 * large.copies == pytest.approx(small.hour.value * small.copies)


def replace_hour(found, hour: float):  # type: ignore[no-untyped-def]
    return found.model_copy(update={"hour": usd(hour)})


@settings(max_examples=20, deadline=None)
@given(st.floats(1, 100), st.floats(10, 5000), st.floats(1, 100), st.floats(10, 5000), st.floats(0.1, 1))
def test_break_even_volumes_divide_as_they_say(h1: float, t1: float, h2: float, t2: float, share: float) -> None:
    question = Question(tokens_per_day=1e6, utilisation=share)
    one, two = option("v6e-8", h1, t1, question), option("2xH100", h2, t2, question)
    found = break_even(one, two, question, 2)
    if found.first:
        below = found.first * 0.999
        assert two.cost_for(below, share) >= one.cost_for(below, share)
    if found.always is not None:
        above = found.always * 1.001 + 1
        assert two.cost_for(above, share) < one.cost_for(above, share)


def test_a_decision_is_sorted_and_adds_up() -> None:
    question = Question(tokens_per_day=50e6, train_runs=4)
    answer = decide(question, MACHINES)
    costs = [found.month.value for found in answer.serve]
    assert costs == sorted(costs)
    runs = [found.run.value for found in answer.train]
    assert runs == sorted(runs)
    best = answer.serve[0]
    assert best.copies == math.ceil(50e6 / (DAY * best.throughput.value * 0.5))
    assert best.month.value == pytest.approx(best.copies * best.hour.value * MONTH)
    assert answer.train[0].month.value == pytest.approx(4 * answer.train[0].run.value)
    assert {pair.other for pair in answer.break_even} == {found.machine for found in answer.serve[1:]}
    assert any(best.machine in line for line in answer.advice)
    tpu, gpu = answer.platforms
    assert (tpu.name, gpu.name) == ("TPU", "GPU")
    assert gpu.train == gpu.serve == "2xH100"
    assert min(tpu.month.value, gpu.month.value) == pytest.approx(
        best.month.value + answer.train[0].month.value, rel=0.05
    )


def test_training_counts_start_and_compiling() -> None:
    answer = decide(Question(), [parse_machine("v6e-8")])
    row = train_row("gemma4-31b", parse_machine("v6e-8"))
    hours = row.hours.value + row.overhead.value / 3600
    assert answer.train[0].run.value == pytest.approx(hours * 21.60)
    figures = json.loads((RESULTS / "bench_slices.json").read_text())["figures"]
    compiled = [
        f["shapes"][0]["program"]["compile_seconds"]
        for name, f in figures.items()
        if name.startswith("gemma4-31b on ") and f["fits"]
    ]
    assert row.overhead.value == pytest.approx(622 + min(compiled))  # the published start, and what compiling takes


def test_prices_decide() -> None:
    """At Google's list prices the slice is cheaper, at a neocloud's the GPUs are; the model's error is larger."""
    names = [parse_machine(name) for name in ("v6e-8", "4xH100")]
    at = Question(tokens_per_day=1e9)
    assert decide(replace(at, provider="google"), names).serve[0].machine == "v6e-8"
    assert decide(at, names).serve[0].machine == "4xH100"
    assert any("smaller than the model's error" in line for line in decide(at, names).advice)
    assert round(model_error(), 1) == 2.1  # as the docstring of serve_model says


def test_what_cannot_be_rented_is_left_out_with_its_reason() -> None:
    answer = decide(Question(plan="flex_start"), [*MACHINES, parse_machine("1xL4")])
    lines = "\n".join(answer.left_out)
    assert "2xH100: no dated flex_start price" in lines
    assert "training on 1xL4: the weights do not fit" in lines
    assert "serving on 1xL4: weights and one sequence do not fit" in lines
    hopeless = decide(Question(ttft_p99=0.001), MACHINES)
    assert hopeless.serve == ()
    assert "misses 1 ms even without load" in hopeless.left_out[-1]
    assert hopeless.advice[0].startswith("No machine here serves")


def test_the_command_answers_and_repeats_itself(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_decide(DecideCommand(json=True)) == 0
    first = capsys.readouterr().out
    answer = json.loads(first)
    assert answer["question"]["tokens_per_day"] == 50e6
    assert answer["serve"][0]["month"]["evidence"] == "modelled"
    assert run_decide(DecideCommand(json=True)) == 0
    assert capsys.readouterr().out == first
    assert run_decide(DecideCommand()) == 0
    text = capsys.readouterr().out
    assert "Break-even" in text
    assert "50M output tokens" in text
    assert run_decide(DecideCommand(ttft_p99="1ms")) == 1


@pytest.mark.parametrize(
    "command",
    [
        DecideCommand(tokens_per_day="0"),
        DecideCommand(tokens_per_day="-5M"),
        DecideCommand(tokens_per_day="many"),
        DecideCommand(tokens_per_day="nan"),
        DecideCommand(ttft_p99="500"),
        DecideCommand(ttft_p99="0ms"),
        DecideCommand(utilisation=0),
        DecideCommand(utilisation=1.5),
        DecideCommand(utilisation=float("nan")),
        DecideCommand(train_runs=-1),
        DecideCommand(train_runs=float("nan")),
        DecideCommand(slices=()),
        DecideCommand(slices=("v6e-9",)),
        DecideCommand(prompt=0),
        DecideCommand(output=-1),
    ],
)
def test_bad_wishes_are_refused(command: DecideCommand) -> None:
    with pytest.raises(UserError):
        run_decide(command)


@pytest.mark.parametrize(
    ("text", "value"), [("50M", 50e6), ("1.2B", 1.2e9), ("7", 7), ("3k", 3000), ("1_000_000", 1e6), ("2,500", 2500)]
)
def test_counts(text: str, value: float) -> None:
    assert parse_count(text, "x") == pytest.approx(value)


def test_times() -> None:
    assert parse_seconds("500ms", "x") == 0.5
    assert parse_seconds("1.5 s", "x") == 1.5


def test_the_paper_by_hand() -> None:
    found = {f.key: f for f in paper.findings()}
    assert paper.cost_ratio(1.61, 4 * 4.20, 2 * 11.06) == pytest.approx(2.12, abs=0.001)
    assert found["cost"].value == pytest.approx(1.61 * 2 * 11.06 / (4 * 4.20))
    assert found["even"].value == pytest.approx(16.80 / 1.61 / 2)
    at_even = paper.cost_ratio(1.61, 16.80, 2 * found["even"].value)
    assert at_even == pytest.approx(1)  # above it the slice is cheaper, below it the GPUs
    assert found["speedup"].value == pytest.approx(5.39 / 3.34)
    assert found["total-hour"].value == pytest.approx(141.35 / 77.63, abs=1e-4)
    assert found["total-day"].value == pytest.approx(650.11 / 572.59, abs=1e-4)
    # 4 prompts of 4,096 tokens a second, 2 FLOPs a weight; attention adds a few percent.
    products = 4 * 4096 * 2 * 29_286_727_680
    assert found["busy-v6e-8"].value == pytest.approx(products / (8 * 918e12), rel=0.06)
    assert found["busy-2xh100"].value == pytest.approx(products / (2 * 989e12), rel=0.06)
    assert found["requests-v6e-8"].value == pytest.approx(30 / 0.0239)
    for name in ("refused-short-v6e-8", "refused-max-2xh100"):
        assert found[name].published
        assert found[name].value > found[name].published


def test_commands_are_read_from_a_command_line() -> None:
    line = ["--train-runs", "4", "--tokens-per-day", "1B", "--ttft-p99", "1s", "--pay", "spot", "--json"]
    asked = tyro.cli(DecideCommand, args=[*line, "--slices", "v6e-8", "2xH100"])
    assert asked == DecideCommand(
        train_runs=4, tokens_per_day="1B", ttft_p99="1s", pay="spot", json=True, slices=("v6e-8", "2xH100")
    )
    table = tyro.cli(TableCommand, args=["--slices", "v6e-8", "--csv", "t.csv", "--runs", "a.json", "b.json"])
    assert table == TableCommand(slices=("v6e-8",), csv=Path("t.csv"), runs=(Path("a.json"), Path("b.json")))


def test_the_documents_words_are_the_papers_findings() -> None:
    words = " ".join((Path(__file__).parents[3] / "docs" / "bench-tables.md").read_text().split())
    found = {f.key: f.value for f in paper.findings()}
    for phrase in (
        f"less than ${found['even']:.2f} an hour",
        f"With a day of serving it is {found['total-day']:.2f}x, with a month {found['total-month']:.2f}x",
        f"prefill alone takes {found['busy-2xh100']:.0%}".replace("%", " %"),
        f"and {found['busy-v6e-8']:.0%}".replace("%", " %") + " of the slice's",
    ):
        assert phrase in words
    assert max(found["share-v5p-8"], found["share-2xh100"]) < 0.05
    assert 0.9 < found["peaks"] < 1
