"""Work for backends to be compared on: toy Gemmas of every family, and a few rows."""

from pathlib import Path
from typing import Any

from tiny_run import save_tokenizer
from toy_gemmas import CASES, randomize
from toy_rows import tool_rows

from portlab_parity.prepare import write
from portlab_spec.data.tokens import Row
from portlab_spec.evidence import Work
from portlab_spec.recipe import Recipe

RECIPE: dict[str, Any] = {
    "steps": 20,
    "batch_size": 4,
    "max_length": 64,
    "dtype": "float32",
    "lora": {"rank": 3, "alpha": 6.0, "targets": ["q_proj", "k_proj", "v_proj", "down_proj"]},
    "optimizer": {
        "learning_rate": 1e-2,
        "schedule": "cosine",
        "warmup_steps": 2,
        "weight_decay": 0.1,
        "b2": 0.95,
        "clip_norm": 0.1,
    },
}
EXPERTS = ["q_proj", "experts.gate_up_proj", "experts.down_proj"]


def some_rows(count: int) -> list[Row]:
    """Rows that begin with BOS, without which nothing can be doubled."""
    return [Row(row.id, (2, *row.ids), (False, *row.loss)) for row in tool_rows(count)]


def toy_work(folder: Path, case: str, *, steps: int = 3, token_ids: tuple[int, ...] = (), answers: bool = True) -> Work:
    """The work on a toy, written into a folder with its base."""
    randomize(CASES[case]()).save_pretrained(folder / "base")
    save_tokenizer(folder / "base")
    lora = RECIPE["lora"] | {"train_control_rows": bool(token_ids)}
    lora |= {"targets": EXPERTS} if "experts" in case else {}
    rows = some_rows(4 * steps)
    return write(
        Recipe.model_validate(RECIPE | {"lora": lora}),
        folder / "base",
        [rows[i : i + 4] for i in range(0, 4 * steps, 4)],
        folder / "work",
        token_ids=token_ids,
        stops=(1,),
        answers=2 if answers else 0,
        new_tokens=4,
    )
