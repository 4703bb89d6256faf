"""What a run computes: its model and its rows, without weights and without a network."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from portlab_jax.model import require_gemma
from portlab_spec.assets import default_model
from portlab_spec.data import load_dataset
from portlab_spec.data.tokens import Row, tokenize
from portlab_spec.errors import UserError
from portlab_spec.files import read_json
from portlab_spec.formats import Format, find_format
from portlab_spec.models import GemmaConfig
from portlab_spec.models.published import published_json, published_models
from portlab_spec.recipe import Recipe
from portlab_spec.run.data import control_token_ids
from portlab_spec.tokenizer import TOKENIZER_FILE, Tokenizer


@dataclass(frozen=True)
class Workload:
    """Rows to train on.

    Attributes:
        config: the model.
        rows: of the training splits, or made up.
        token_ids: rows of the embedding to train.
        source: where the rows are from, for people.
        assumed: whether they are made up.
    """

    config: GemmaConfig
    rows: tuple[Row, ...]
    token_ids: tuple[int, ...]
    source: str
    assumed: bool


def read_model(model: str) -> dict[str, Any]:
    """A model's `config.json`, parsed: of a folder, the default model's, or a published one shipped for planning.

    Raises:
        UserError: no such folder and no published model of that name.
    """
    if model == "default":
        model = "google/gemma-3-270m"
    if (path := Path(model, "config.json")).is_file():
        return read_json(path, "model config")
    published = published_json(model)
    if published is None:
        raise UserError(
            f"the shape of {model!r} is not known here",
            where="model",
            fix=f"Give a folder with its config.json, or one of {', '.join(published_models())}",
        )
    return published


def find_config(model: str, *, gemma_only: bool = True) -> GemmaConfig:
    """The model of a recipe.

    Args:
        model: as `read_model` takes it.
        gemma_only: train-jax is to compute it.

    Raises:
        UserError: as `read_model`; a model that is not known, or that train-jax has not.
    """
    config = GemmaConfig.from_dict(read_model(model), where=str(Path(model, "config.json")))
    if gemma_only:
        require_gemma(config)
    return config


def find_workload(
    recipe: Recipe, *, length: int | None = None, supervised: int | None = None, gemma_only: bool = True
) -> Workload:
    """The rows of a recipe, read and tokenised as training would, or rows of a given length.

    Args:
        recipe: the run.
        length: plan for rows of so many tokens that share nothing, instead of the recipe's data.
        supervised: of these, training targets; by default the last eighth.
        gemma_only: train-jax is to train on them.

    Raises:
        UserError: the model's shape is not known; the data cannot be read, or have no training rows.
    """
    config = find_config(recipe.model, gemma_only=gemma_only)
    if length is not None:
        return made_up(recipe, config, length, supervised or max(length // 8, 1))
    if supervised is not None:
        raise UserError("says nothing without --length", where="--supervised", fix="Give both, or neither")
    try:
        conversations = load_dataset(recipe.data)
    except UserError as error:
        raise UserError(
            error.what,
            where=error.where or recipe.data,
            fix="Give the file with --data, or plan without it for rows of a given length: --length 2048",
        ) from None
    chosen = [c for c in conversations if c.split in recipe.train_splits]
    fmt = find_format(recipe.format)
    tokenizer = find_tokenizer(recipe.model, config, fmt)
    rows = tokenize(chosen, fmt, tokenizer, recipe.max_length, policy=recipe.too_long)
    if not rows:
        raise UserError("there are no training rows", where=recipe.data, fix="Look at train_splits and max_length")
    token_ids = control_token_ids(recipe, fmt, tokenizer)
    return Workload(config, tuple(rows), token_ids, f"{len(rows)} rows of {recipe.data}", assumed=False)


def made_up(recipe: Recipe, config: GemmaConfig, length: int, supervised: int) -> Workload:
    """A batch of rows of one length, all tokens different enough that nothing is shared.

    Raises:
        UserError: more targets than tokens that could be predicted; rows longer than `max_length`.
    """
    if not 0 < supervised < length:
        raise UserError(
            f"{supervised} of {length} tokens cannot be targets", where="--supervised", fix="Give fewer than --length"
        )
    if length > recipe.max_length:
        raise UserError(
            f"rows of {length} tokens are longer than max_length {recipe.max_length}",
            where="--length",
            fix=f"Add --max-length {length}",
        )
    tokens = np.random.default_rng(0).integers(8, config.vocab_size, (recipe.batch_size, length))
    loss = (False,) * (length - supervised) + (True,) * supervised
    rows = tuple(Row(f"row {i}", tuple(ids), loss) for i, ids in enumerate(tokens.tolist()))
    # Which rows of the embedding are trained does not matter, only how many.
    trained = len(find_format(recipe.format).added_tokens) if recipe.trains_control_rows else 0
    token_ids = tuple(range(8, 8 + trained))
    source = f"rows of {length} tokens, {supervised} of them targets, that share nothing"
    return Workload(config, rows, token_ids, source, assumed=True)


def find_tokenizer(model: str, config: GemmaConfig, fmt: Format) -> Tokenizer:
    """The model's own tokenizer if it is a folder, else the embedded default model's, renamed for Gemma 4.

    All Gemma 3 and 4 tokenizers split text alike and differ in the names of control tokens.

    Raises:
        UserError: a model of another family, without its tokenizer.
    """
    folder = Path(model)
    if not (folder / TOKENIZER_FILE).is_file():
        if not config.is_gemma:
            raise UserError(
                f"{TOKENIZER_FILE} is missing, and {config.family} splits text in its own way",
                where=model,
                fix="Put it beside the config.json, or plan for rows of a given length: --length 2048",
            )
        folder = default_model().path
    return Tokenizer.load(folder).with_names_for(fmt.control_tokens)
