"""A recipe: everything that defines a run, in one file.

Recipes are YAML. Some ship with the package and are given by name, others by path; every field can be set on the
command line (`--lora.rank 32`). An unknown key, a wrong type or an impossible combination is an error that names
the file and the key.
"""

import difflib
from importlib import resources
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from portlab_spec.data.tokens import Policy
from portlab_spec.errors import UserError
from portlab_spec.formats import find_format


class Section(BaseModel):
    """Base of the recipe's parts: immutable, unknown keys refused, types not coerced from text."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Lora(Section):
    """Low-rank adapters, in PEFT's terms."""

    rank: int = Field(16, ge=1, description="inner dimension of the adapters")
    alpha: float = Field(32.0, gt=0, description="scale numerator: alpha / rank, or alpha / sqrt(rank) with rslora")
    use_rslora: bool = Field(False, description="divide alpha by sqrt(rank) instead of rank")
    dropout: float = Field(0.0, ge=0, lt=1, description="dropout on the adapter's input while training")
    targets: tuple[str, ...] = Field(
        ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
        min_length=1,
        description="linear layers to adapt, by last name or dotted name",
    )
    train_control_rows: bool = Field(
        True,
        description="also train the embedding rows of the format's control tokens that the base never used",
    )

    @property
    def scaling(self) -> float:
        """Factor on the adapter's output."""
        return self.alpha / (self.rank**0.5 if self.use_rslora else self.rank)


class Optimizer(Section):
    """AdamW with warm-up and linear or cosine decay."""

    learning_rate: float = Field(4e-4, gt=0, description="peak learning rate")
    warmup_steps: int = Field(2, ge=0, description="steps of linear warm-up")
    schedule: Literal["constant", "linear", "cosine"] = Field("linear", description="decay after the warm-up")
    final_fraction: float = Field(0.05, ge=0, le=1, description="last learning rate as a share of the peak")
    b1: float = Field(0.9, ge=0, lt=1, description="AdamW, decay of the first moment")
    b2: float = Field(0.99, ge=0, lt=1, description="AdamW, decay of the second moment")
    eps: float = Field(1e-8, gt=0, description="AdamW, added to the root of the second moment")
    weight_decay: float = Field(0.0, ge=0, description="AdamW, decoupled decay of the adapter")
    clip_norm: float = Field(1.0, gt=0, description="gradients are scaled down to this global norm")


class Mesh(Section):
    """How devices are arranged. Data parallelism by default; the product must be the number of devices."""

    data: int | None = Field(None, ge=1, description="copies that see different rows; null fills the devices")
    fsdp: int = Field(1, ge=1, description="ways to shard the frozen weights' hidden dimension; rows split too")
    tp: int = Field(1, ge=1, description="ways to shard heads, MLP and vocabulary")


class Recipe(Section):
    """One run: model, data, format, adapter, optimiser, batch."""

    name: str = Field("custom", description="names the default run folder")
    model: str = Field("default", description="'default', a local folder, or a Hugging Face id")
    revision: str | None = Field(None, description="Hugging Face revision of the model")
    data: str = Field("fitness-213", description="a built-in data set, or a file or folder of any known shape")
    format: str = Field("functiongemma", description="wire format of prompts and calls")
    lora: Lora = Lora()
    optimizer: Optimizer = Optimizer()
    mesh: Mesh = Mesh()
    remat: bool = Field(False, description="recompute layers in the backward pass: less memory, more time")
    steps: int = Field(30, ge=1, description="optimiser steps")
    batch_size: int = Field(32, ge=1, description="examples per step over all devices")
    max_length: int = Field(1024, ge=8, description="longest row in tokens")
    too_long: Policy = Field(
        "error", description="what becomes of a longer training row; its answer is never cut, whatever the policy"
    )
    train_splits: tuple[Literal["train", "validation"], ...] = Field(
        ("train",), min_length=1, description="splits to train on; add validation once every choice is made"
    )
    eval_split: Literal["validation", "test"] = Field("test", description="held-out split to score before and after")
    max_new_tokens: int = Field(48, ge=1, description="longest generated answer in evaluation")
    save_every: int = Field(10, ge=1, description="steps between checkpoints")
    seed: int = Field(0, ge=0, description="initialisation and row order")
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto", description="compute type of the frozen base; auto is float32 on CPU, bfloat16 elsewhere"
    )

    @model_validator(mode="after")
    def _check(self) -> "Recipe":
        if self.optimizer.warmup_steps >= self.steps:
            raise ValueError(
                f"optimizer.warmup_steps ({self.optimizer.warmup_steps}) must be below steps ({self.steps})"
            )
        try:
            find_format(self.format)
        except UserError as error:
            raise ValueError(f"format: {error}") from None
        if self.eval_split in self.train_splits:
            raise ValueError(f"eval_split {self.eval_split!r} is trained on: set train_splits to train alone")
        return self


def shipped_recipes() -> list[str]:
    """Names of the recipes in this package."""
    folder = resources.files("portlab_spec") / "recipes"
    return sorted(f.name.removesuffix(".yaml") for f in folder.iterdir() if f.name.endswith(".yaml"))


def load_recipe(name_or_path: str, overrides: dict[str, Any] | None = None) -> Recipe:
    """Load a recipe by name or path and apply overrides.

    Args:
        name_or_path: a shipped recipe's name, or a path to a YAML file.
        overrides: dotted key -> value, as given on the command line.

    Raises:
        UserError: no such recipe, not YAML, an unknown key (with the nearest known one), a wrong value.
    """
    where, text = _find(name_or_path)
    try:
        raw = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise UserError(f"the recipe is not YAML ({error})", where=where, fix="Mend the file") from None
    if not isinstance(raw, dict):
        raise UserError("the recipe must be a mapping of keys to values", where=where, fix="See docs/recipes.md")
    for key, value in (overrides or {}).items():
        *parents, leaf = key.split(".")
        node = raw
        for parent in parents:
            node = node.setdefault(parent, {})
        node[leaf] = value
    try:
        return Recipe.model_validate(raw)
    except ValidationError as error:
        raise invalid(error, where) from None


def _find(name_or_path: str) -> tuple[str, str]:
    if name_or_path in shipped_recipes():
        file = resources.files("portlab_spec") / "recipes" / f"{name_or_path}.yaml"
        return f"recipe {name_or_path}", file.read_text(encoding="utf-8")
    path = Path(name_or_path)
    if path.is_file():
        return str(path), path.read_text(encoding="utf-8")
    raise UserError(
        f"no recipe {name_or_path!r}",
        fix=f"Give a path to a YAML file, or one of: {', '.join(shipped_recipes())}",
    )


def invalid(error: ValidationError, where: str) -> UserError:
    """All faults of a recipe in one line, unknown keys with a suggestion."""
    lines = []
    for fault in error.errors():
        key = ".".join(str(part) for part in fault["loc"])
        if fault["type"] == "extra_forbidden":
            near = difflib.get_close_matches(key, field_names(), n=1)
            lines.append(f"unknown key {key!r}" + (f" (did you mean {near[0]!r}?)" if near else ""))
        else:
            message = fault["msg"].removeprefix("Value error, ")
            lines.append(f"{key}: {message}, got {fault['input']!r}" if key else message)
    return UserError("; ".join(lines), where=where, fix="See docs/recipes.md for every key")


def field_names(section: type[BaseModel] = Recipe, prefix: str = "") -> list[str]:
    """Dotted names of all recipe fields."""
    names: list[str] = []
    for name, field in section.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            names += field_names(kind, f"{prefix}{name}.")
        else:
            names.append(prefix + name)
    return names
