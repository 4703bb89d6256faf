"""The work of a comparison, made from a recipe: a handful of its rows, and an adapter to start from."""

from collections.abc import Sequence
from pathlib import Path

from portlab_parity.start import write_start
from portlab_spec.assets import resolve_model
from portlab_spec.data.tokens import Row
from portlab_spec.errors import UserError
from portlab_spec.evidence import Work, write_work
from portlab_spec.evidence.work import START
from portlab_spec.packing import BatchOrder
from portlab_spec.recipe import Recipe
from portlab_spec.run.data import control_token_ids, load_run_data, tokenize_run
from portlab_spec.run.evaluate import stop_ids
from portlab_spec.tokenizer import Tokenizer

ROWS, STEPS, ANSWERS, NEW_TOKENS = 8, 3, 2, 16


def prepare(recipe: Recipe, folder: Path, *, rows: int = ROWS, steps: int = STEPS) -> Work:
    """Write the work of a recipe into a new folder.

    Args:
        recipe: to compare backends on.
        folder: to make.
        rows: of a step; a multiple of the recipe's `accumulate`.
        steps: to take.

    Raises:
        UserError: the recipe trains all weights, or is shorter than that; the model or the data cannot be read.
    """
    if recipe.method != "lora":
        raise UserError(
            "adapters are compared, and the recipe trains all weights",
            where="method",
            fix="Compare with method lora: the forward pass and the optimiser are the same",
        )
    model = resolve_model(recipe.model, recipe.revision).path
    tokenizer, data = Tokenizer.load(model), load_run_data(recipe)
    known = tokenize_run(recipe, data, tokenizer).train
    order = BatchOrder(known, recipe.batch_size, recipe.steps, recipe.seed, group_by_prefix=recipe.group_by_prefix)
    flat = [row for step in order for row in step][: rows * steps]
    return write(
        recipe,
        model,
        [flat[i : i + rows] for i in range(0, len(flat), rows)],
        folder,
        token_ids=control_token_ids(recipe, data.fmt, tokenizer),
        stops=stop_ids(data.fmt, tokenizer),
        texts={row.id: tokenizer.decode(row.ids) for row in flat},
    )


def write(
    recipe: Recipe,
    model: Path,
    steps: Sequence[Sequence[Row]],
    folder: Path,
    *,
    token_ids: tuple[int, ...] = (),
    stops: tuple[int, ...] = (),
    texts: dict[str, str] | None = None,
    answers: int = ANSWERS,
    new_tokens: int = NEW_TOKENS,
) -> Work:
    """Write the work on given rows: an adapter is drawn for `lora.start_from`, and dropout taken out.

    Raises:
        UserError: too few rows for a step, or the recipe has fewer steps.
    """
    if len(steps) > recipe.steps or not steps or len(steps[-1]) < len(steps[0]):
        raise UserError(
            f"the recipe has not enough rows and steps for {len(steps)} steps of {len(steps[0]) if steps else 0} rows",
            where="--rows, --steps",
            fix="Take fewer",
        )
    # What is drawn at random differs between libraries: dropout is compared as being off.
    lora = recipe.lora.model_copy(update={"dropout": 0.0})
    batch = {"batch_size": len(steps[0]), "lora": lora}
    if len(steps[0]) % recipe.accumulate:
        batch["accumulate"] = 1
    recipe = recipe.model_copy(update=batch)
    start = folder / START
    write_start(recipe, model, token_ids, start)
    lora = lora.model_copy(update={"start_from": str(start.absolute())})
    work = Work(
        recipe=Recipe.model_validate(recipe.model_copy(update={"lora": lora}).model_dump()),
        model=model,
        token_ids=token_ids,
        steps=[list(step) for step in steps],
        texts=texts or {},
        prompts=[list(row.ids[: row.first_target]) for row in steps[0][:answers]],
        stop_ids=stops,
        new_tokens=new_tokens,
    )
    write_work(work, folder)
    return work
