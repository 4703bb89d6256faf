"""Stages and what a run tells of them: computed once, read afterwards, summed up in a line each."""

import pytest

from portlab_spec.conversation import Conversation, Message
from portlab_spec.errors import UserError
from portlab_spec.metrics import Metric
from portlab_spec.recipe import Recipe
from portlab_spec.report import Evaluation
from portlab_spec.run.evaluate import Answers
from portlab_spec.run.outcome import telling_example, training_line
from portlab_spec.run.stages import Stage, cached_stage, scored_line

EXACT = Metric(value=59 / 63, low=0.8, high=1.0, hits=59, count=63)


def answers(**outputs):
    return Answers(Evaluation(split="test", examples=63, metrics={"call_exact": EXACT}), outputs)


def test_a_stage_is_computed_once(tmp_path):
    calls = []

    def compute():
        calls.append(1)
        return answers(a="yes")

    first, cached = cached_stage(tmp_path / "before.json", compute)
    assert not cached
    assert cached_stage(tmp_path / "before.json", compute) == (first, True)
    assert len(calls) == 1


def test_a_failed_stage_leaves_nothing(tmp_path):
    def fail():
        raise UserError("no")

    with pytest.raises(UserError):
        cached_stage(tmp_path / "before.json", fail)
    assert list(tmp_path.iterdir()) == []


def test_the_line_of_a_stage():
    stage = Stage(answers(), 4.23)
    assert scored_line("before", stage, cached=False) == "scored before training: 59/63 exact calls in 4.2 s"
    said = scored_line("before", stage, cached=False, tokens_per_second=123.4)
    assert said == "scored before training: 59/63 exact calls in 4.2 s, 123 tokens/s generated"
    assert scored_line("after", stage, cached=True) == "scored after training: 59/63 exact calls in 4.2 s (cached)"


LOSSES = [2.0, 1.0, 0.5, 0.25]
LINES = {
    "trained 4 steps in 2.0 s, 8.0 examples/s with compilation, loss 2.000 -> 0.2500": {},
    "trained 1 steps from step 3 in 2.0 s, 2.0 examples/s with compilation, loss 2.000 -> 0.2500": {"fresh_steps": 1},
    "trained 4 steps in 9.0 s, loss 0.2500 (cached)": {"fresh_steps": 0},
    "trained 4 steps in 2.0 s, 8.0 examples/s with compilation, MFU 42.0%, loss 2.000 -> 0.2500": {
        "rates": {"mfu": 0.42}
    },
    "trained 4 steps in 2.0 s, 8.0 examples/s with compilation, loss 2.000 -> 0.2500, kept step 2": {
        "exported_step": 2
    },
}


@pytest.mark.parametrize("line", LINES)
def test_the_line_of_the_training(line):
    settings = {"fresh_steps": 4, "fresh_seconds": 2.0, "exported_step": 4, "rates": {}} | LINES[line]
    assert training_line(Recipe(steps=4, batch_size=4), losses=LOSSES, seconds=9.0, **settings) == line


def test_an_early_stop_is_told():
    line = training_line(
        Recipe(steps=9), losses=LOSSES, seconds=2.0, fresh_steps=4, fresh_seconds=2.0, exported_step=4, rates={}
    )
    assert line.endswith("stopped early at step 4")


CONVERSATIONS = [Conversation(id=name, messages=(Message(role="user", content="?"),)) for name in "abc"]


def test_the_example_is_the_first_whose_answer_changed():
    before = answers(a="1", b="2", c="3")
    assert telling_example(CONVERSATIONS, before, answers(a="1", b="9", c="9")).id == "b"
    assert telling_example(CONVERSATIONS, before, before).id == "a"
