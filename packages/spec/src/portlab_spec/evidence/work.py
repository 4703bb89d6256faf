"""The work that backends are compared on: rows, their order, the adapter to start from. One folder.

work.json     recipe, model, rows of every step, prompts to answer
start/        PEFT's two files of the adapter that every backend starts from
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from portlab_spec.data.tokens import Row
from portlab_spec.errors import UserError
from portlab_spec.files import read_json, sha256_json, write_json
from portlab_spec.recipe import Recipe

FILE, START = "work.json", "start"


class _Row(BaseModel):
    model_config = ConfigDict(extra="forbid")

    id: str
    ids: list[int]
    loss: list[bool]
    text: str = ""


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid")

    schema_version: Literal[1] = 1
    recipe: Recipe
    model: Path
    token_ids: list[int]
    steps: list[list[_Row]]
    prompts: list[list[int]]
    stop_ids: list[int]
    new_tokens: int


@dataclass(frozen=True)
class Work:
    """What every backend computes.

    Attributes:
        recipe: of all of them; its `lora.start_from` is the adapter that they start from.
        model: folder of the base.
        token_ids: rows of the embedding that are trained, ascending.
        steps: the rows of each step, in order.
        texts: a row's text by its id; for scripts that tokenise by themselves. Empty where rows have none.
        prompts: to answer greedily after the last step.
        stop_ids: that end an answer.
        new_tokens: longest answer.
    """

    recipe: Recipe
    model: Path
    token_ids: tuple[int, ...]
    steps: list[list[Row]]
    texts: dict[str, str]
    prompts: list[list[int]]
    stop_ids: tuple[int, ...]
    new_tokens: int

    @property
    def given(self) -> dict[str, str]:
        """Digest of each row of the first step, by its id."""
        return {row.id: row_digest(row.ids, row.loss) for row in self.steps[0]}


def row_digest(ids: Iterable[int], loss: Iterable[bool]) -> str:
    """Digest of a row's tokens and flags, by which evidence is held to what a backend was given."""
    return sha256_json([[int(token) for token in ids], [bool(flag) for flag in loss]])[:16]


def write_work(work: Work, folder: Path) -> None:
    """Write `work.json`; the adapter is there already."""
    rows = [
        [_Row(id=row.id, ids=list(row.ids), loss=list(row.loss), text=work.texts.get(row.id, "")) for row in step]
        for step in work.steps
    ]
    file = _File(
        recipe=work.recipe,
        model=work.model.absolute(),
        token_ids=list(work.token_ids),
        steps=rows,
        prompts=work.prompts,
        stop_ids=list(work.stop_ids),
        new_tokens=work.new_tokens,
    )
    write_json(folder / FILE, file.model_dump(mode="json"))


def read_work(folder: Path) -> Work:
    """Read `work.json`.

    Raises:
        UserError: missing, not JSON, or not of this schema.
    """
    path = folder / FILE
    try:
        file = _File.model_validate(read_json(path, "work of a comparison"))
    except ValidationError as error:
        raise UserError(
            f"is not the work of a comparison ({error.errors()[0]['msg']} at {error.errors()[0]['loc']})",
            where=str(path),
            fix="Write it with portlab-parity of the same version",
        ) from None
    return Work(
        recipe=file.recipe,
        model=file.model,
        token_ids=tuple(file.token_ids),
        steps=[[Row(row.id, tuple(row.ids), tuple(row.loss)) for row in step] for step in file.steps],
        texts={row.id: row.text for step in file.steps for row in step if row.text},
        prompts=file.prompts,
        stop_ids=tuple(file.stop_ids),
        new_tokens=file.new_tokens,
    )
