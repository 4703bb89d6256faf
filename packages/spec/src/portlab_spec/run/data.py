"""The conversations of a run, by use, and the rows that are trained on."""

from dataclasses import dataclass

from portlab_spec.conversation import Conversation
from portlab_spec.data import load_dataset
from portlab_spec.data.tokens import Row, tokenize
from portlab_spec.errors import UserError
from portlab_spec.formats import Format, find_format
from portlab_spec.recipe import Recipe
from portlab_spec.tokenizer import Tokenizer


@dataclass(frozen=True)
class RunData:
    """The conversations of a run.

    Attributes:
        fmt: wire format of prompts and calls.
        train: of the recipe's `train_splits`.
        held_out: scored before and after training.
        monitored: whose loss is measured while training; any split if the recipe measures none.
    """

    fmt: Format
    train: list[Conversation]
    held_out: list[Conversation]
    monitored: list[Conversation]


@dataclass(frozen=True)
class RunRows:
    """The rows of a run.

    Attributes:
        train: to train on.
        held_out: whose answers are scored, and whose loss is measured with them.
        monitored: whose loss is measured while training; none if the recipe measures none.
    """

    train: list[Row]
    held_out: list[Row]
    monitored: list[Row]


def load_run_data(recipe: Recipe) -> RunData:
    """Load a recipe's data set and share it out.

    Raises:
        UserError: the data set cannot be read, or has no rows to score or to monitor.
    """
    conversations = load_dataset(recipe.data)
    by_split = {split: [c for c in conversations if c.split == split] for split in ("validation", "test")}
    monitor = (recipe.monitor_split,) if recipe.eval_every else ()
    for split, use in ((recipe.eval_split, "to score"), *((split, "to monitor") for split in monitor)):
        if not by_split[split]:
            raise UserError(
                f"the data set has no {split} rows {use}", where=recipe.data, fix='Give some rows a "split"'
            )
    train = [c for c in conversations if c.split in recipe.train_splits]
    return RunData(find_format(recipe.format), train, by_split[recipe.eval_split], by_split[recipe.monitor_split])


def tokenize_run(recipe: Recipe, data: RunData, tokenizer: Tokenizer) -> RunRows:
    """Turn the conversations of a run into rows of tokens.

    Raises:
        UserError: a conversation cannot be rendered or is too long, the held-out ones included: better now than after
            training.
    """
    train = tokenize(data.train, data.fmt, tokenizer, recipe.max_length, policy=recipe.too_long)
    held_out = tokenize(data.held_out, data.fmt, tokenizer, recipe.max_length)
    if not recipe.eval_every:
        return RunRows(train, held_out, [])
    monitored = tokenize(data.monitored, data.fmt, tokenizer, recipe.max_length, policy=recipe.too_long)
    return RunRows(train, held_out, monitored)


def control_token_ids(recipe: Recipe, fmt: Format, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Rows of the embedding that a run trains by themselves, ascending: those of its format's added tokens."""
    if not recipe.trains_control_rows:
        return ()
    return tuple(sorted(tokenizer.token_id(token) for token in fmt.added_tokens))
