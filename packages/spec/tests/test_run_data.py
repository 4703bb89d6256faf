"""The conversations and rows of a run: shared out by split, and complete before anything long begins."""

import dataclasses
import json

import pytest
from char_tokenizer import CharTokenizer

from portlab_spec.errors import UserError
from portlab_spec.formats import find_format
from portlab_spec.recipe import Lora, Recipe
from portlab_spec.run.data import control_token_ids, load_run_data, tokenize_run

FMT = find_format("functiongemma")


@pytest.fixture
def tokenizer():
    return CharTokenizer(sorted({*FMT.control_tokens, *FMT.stop_tokens, "<bos>"}))


@pytest.fixture
def data_file(tmp_path):
    """Writes a data set with so many rows of each split, whose questions have some length."""

    def write(question=5, **splits):
        lines = [
            {
                "id": f"{split}-{i}",
                "split": split,
                "messages": [
                    {"role": "user", "content": f"{split} {i}" + "?" * question},
                    {"role": "assistant", "content": "a"},
                ],
            }
            for split, count in splits.items()
            for i in range(count)
        ]
        path = tmp_path / f"{'-'.join(splits)}-{question}.jsonl"
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        return str(path)

    return write


def test_conversations_go_to_their_use(data_file):
    data = load_run_data(Recipe(data=data_file(train=3, validation=2, test=1)))
    assert [c.split for c in data.train] == ["train"] * 3
    assert [c.split for c in data.held_out] == ["test"]
    assert [c.split for c in data.monitored] == ["validation"] * 2
    assert data.fmt is FMT


def test_validation_may_be_trained_on(data_file):
    recipe = Recipe(data=data_file(train=3, validation=2, test=1), train_splits=("train", "validation"))
    assert len(load_run_data(recipe).train) == 5


def test_nothing_to_score_is_refused(data_file):
    with pytest.raises(UserError, match="the data set has no test rows to score"):
        load_run_data(Recipe(data=data_file(train=3, validation=2)))


def test_nothing_to_monitor_is_refused_only_if_it_is_measured(data_file):
    path = data_file(train=3, test=2)
    load_run_data(Recipe(data=path))
    with pytest.raises(UserError, match="the data set has no validation rows to monitor"):
        load_run_data(Recipe(data=path, eval_every=2))


@pytest.mark.parametrize(("eval_every", "monitored"), [(0, 0), (2, 2)])
def test_rows_are_monitored_if_the_loss_is_measured(data_file, tokenizer, eval_every, monitored):
    recipe = Recipe(data=data_file(train=3, validation=2, test=1), eval_every=eval_every)
    rows = tokenize_run(recipe, load_run_data(recipe), tokenizer)
    assert (len(rows.train), len(rows.monitored)) == (3, monitored)


def test_a_held_out_row_that_is_too_long_is_found_before_training(data_file, tokenizer):
    """Whatever the policy is for training rows."""
    short = Recipe(data=data_file(train=3, test=1), max_length=100, too_long="drop")
    long = short.model_copy(update={"data": data_file(test=1, question=300)})
    data = dataclasses.replace(load_run_data(short), held_out=load_run_data(long).held_out)
    with pytest.raises(UserError, match="test-0"):
        tokenize_run(short, data, tokenizer)


def test_control_rows_are_those_of_the_added_tokens(tokenizer):
    ids = control_token_ids(Recipe(), FMT, tokenizer)
    assert ids == tuple(sorted(ids))
    assert {tokenizer.decode([i]) for i in ids} == set(FMT.added_tokens)


@pytest.mark.parametrize("recipe", [Recipe(method="full"), Recipe(lora=Lora(train_control_rows=False))])
def test_no_control_rows_are_trained_by_themselves_otherwise(tokenizer, recipe):
    assert control_token_ids(recipe, FMT, tokenizer) == ()
