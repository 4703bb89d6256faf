"""A recipe: everything that defines a run, in one file.

Recipes are YAML. Some ship with the package and are given by name, others by path; every field can be set on the
command line (`--lora.rank 32`). An unknown key, a wrong type or an impossible combination is an error that names
the file and the key.
"""

import difflib
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from portlab_spec.data.tokens import Policy
from portlab_spec.errors import UserError
from portlab_spec.formats import find_format
from portlab_spec.models.targets import ModulePattern, scaling

Rank = Annotated[int, Field(ge=1)]
Alpha = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class Section(BaseModel):
    """Base of the recipe's parts: immutable, unknown keys refused, types not coerced from text."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Lora(Section):
    """Low-rank adapters, in PEFT's terms."""

    rank: Rank = Field(16, description="inner dimension of the adapters")
    alpha: Alpha = Field(32.0, description="scale numerator: alpha / rank, or alpha / sqrt(rank) with rslora")
    use_rslora: bool = Field(False, description="divide alpha by sqrt(rank) instead of rank")
    dropout: float = Field(0.0, ge=0, lt=1, description="dropout on the adapter's input while training")
    targets: tuple[ModulePattern, ...] = Field(
        ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
        min_length=1,
        description="linear layers to adapt: last names, dotted names, or regular expressions over whole module paths",
    )
    rank_pattern: dict[ModulePattern, Rank] = Field(
        {}, description="other ranks for some layers: expression for the end of a module path -> rank"
    )
    alpha_pattern: dict[ModulePattern, Alpha] = Field(
        {}, description="other alphas for some layers: expression for the end of a module path -> alpha"
    )
    quantize: Literal["none", "int8", "nf4"] = Field(
        "none", description="storage of the frozen linear layers while training; the export has the original base"
    )
    start_from: str | None = Field(None, description="go on from this adapter: a run folder or a PEFT adapter folder")
    train_control_rows: bool = Field(
        True,
        description="also train the embedding rows of the format's control tokens that the base never used",
    )

    @property
    def scaling(self) -> float:
        """Factor on the adapter's output, where no pattern says otherwise."""
        return scaling(self.alpha, self.rank, self.use_rslora)


class Optimizer(Section):
    """AdamW or Adafactor behind a clip, with warm-up and a schedule."""

    name: Literal["adamw", "adafactor"] = Field(
        "adamw", description="adafactor holds a row and a column of the second moment and no first one"
    )
    learning_rate: float = Field(4e-4, gt=0, description="peak learning rate")
    warmup_steps: int = Field(2, ge=0, description="steps of linear warm-up")
    schedule: Literal["constant", "linear", "cosine", "wsd", "inverse_sqrt"] = Field(
        "linear", description="after the warm-up; wsd is constant, then linear over the last decay_fraction"
    )
    decay_fraction: float = Field(0.1, gt=0, le=1, description="wsd: share of the steps that decay")
    final_fraction: float = Field(
        0.05, ge=0, le=1, description="last learning rate as a share of the peak (linear, cosine, wsd)"
    )
    b1: float = Field(0.9, ge=0, lt=1, description="AdamW, decay of the first moment")
    b2: float = Field(0.99, ge=0, lt=1, description="AdamW, decay of the second moment")
    eps: float = Field(1e-8, gt=0, description="AdamW, added to the root of the second moment")
    weight_decay: float = Field(
        0.0, ge=0, description="decoupled decay; never of norms and other vectors when all weights are trained"
    )
    clip_norm: float = Field(1.0, gt=0, description="gradients are scaled down to this global norm")

    def decay_steps(self, steps: int) -> int:
        """Steps at the end of a run in which `wsd` decays."""
        return max(round(self.decay_fraction * steps), 1)


class Mesh(Section):
    """How devices are arranged; what is null is chosen so that the weights fit."""

    data: int | None = Field(None, ge=1, description="copies of the weights, which see different rows")
    fsdp: int | None = Field(None, ge=1, description="ways to shard the weights' hidden dimension; rows split too")
    tp: int | None = Field(None, ge=1, description="ways to shard heads, MLP, experts and vocabulary")


class Profile(Section):
    """A trace of some steps for XProf or Perfetto."""

    start: int = Field(3, ge=1, description="first traced step of this process; the first of all compiles")
    steps: int = Field(0, ge=0, description="traced steps; 0 traces nothing")


class Recipe(Section):
    """One run: model, data, format, adapter, optimiser, batch."""

    name: str = Field("custom", description="names the default run folder")
    model: str = Field("default", description="'default', a local folder, or a Hugging Face id")
    revision: str | None = Field(None, description="Hugging Face revision of the model")
    data: str = Field("fitness-213", description="a built-in data set, or a file or folder of any known shape")
    format: str = Field("functiongemma", description="wire format of prompts and calls")
    method: Literal["lora", "full"] = Field("lora", description="train adapters beside frozen weights, or all weights")
    lora: Lora = Lora()
    optimizer: Optimizer = Optimizer()
    mesh: Mesh = Mesh()
    remat: Literal["none", "block", "dots", "offload"] = Field(
        "none",
        description="recomputed in the backward pass: nothing, whole layers, all but matrix products, or whole layers "
        "whose inputs wait in host memory",
    )
    attention: Literal["auto", "xla", "splash", "cudnn"] = Field(
        "auto", description="attention kernel; auto is splash on TPU, cudnn on NVIDIA where it applies, else xla"
    )
    steps: int = Field(30, ge=1, description="optimiser steps")
    batch_size: int = Field(32, ge=1, description="examples per step over all devices")
    accumulate: int = Field(1, ge=1, description="parts into which a step's examples are cut, one after the other")
    max_length: int = Field(1024, ge=8, description="longest row in tokens")
    too_long: Policy = Field(
        "error", description="what becomes of a longer training row; its answer is never cut, whatever the policy"
    )
    share_prefix: bool = Field(True, description="compute once what the rows of a batch start with in common")
    group_by_prefix: bool = Field(
        False, description="fill a batch from few sets of tools, so that its examples have more in common"
    )
    pack: bool = Field(True, description="put several examples into one row; false pads each to a row of its own")
    chunk: int | None = Field(
        None, ge=8, description="supervised tokens whose logits are in memory at a time; null is chosen for the device"
    )
    max_shapes: int = Field(1, ge=1, description="different batch shapes, each of which compiles once")
    z_loss: float = Field(0.0, ge=0, description="weight of the squared log-partition in the loss")
    train_splits: tuple[Literal["train", "validation"], ...] = Field(
        ("train",), min_length=1, description="splits to train on; add validation once every choice is made"
    )
    eval_split: Literal["validation", "test"] = Field("test", description="held-out split to score before and after")
    max_new_tokens: int = Field(48, ge=1, description="longest generated answer in evaluation")
    eval_every: int = Field(0, ge=0, description="steps between measurements of the monitored loss; 0 measures none")
    monitor_split: Literal["validation", "test"] = Field("validation", description="split of the monitored loss")
    patience: int = Field(0, ge=0, description="stop after so many measurements without a new lowest; 0 never stops")
    log_every: int = Field(
        1, ge=1, description="steps between reads of losses from the device; train-jax reads every step, one step late"
    )
    save_every: int = Field(10, ge=1, description="steps between checkpoints")
    keep: int = Field(2, ge=1, description="newest checkpoints that are kept")
    keep_best: bool = Field(False, description="also keep the checkpoint of the lowest monitored loss, and export it")
    trackers: tuple[Literal["tensorboard", "trackio"], ...] = Field(
        (), description="where metrics go beside metrics.jsonl; each needs the extra of its name"
    )
    profile: Profile = Profile()
    seed: int = Field(0, ge=0, description="initialisation and row order")
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto", description="compute type of the frozen base; auto is float32 on CPU, bfloat16 elsewhere"
    )

    @property
    def trains_control_rows(self) -> bool:
        """Whether rows of the embedding are trained by themselves; full fine-tuning trains them all."""
        return self.method == "lora" and self.lora.train_control_rows

    @field_validator("remat", mode="before")
    @classmethod
    def _name_the_policy(cls, value: Any) -> Any:
        if isinstance(value, bool):
            raise ValueError(f"is the name of a policy now: write remat: {'block' if value else 'none'}")
        return value

    @model_validator(mode="after")
    def _check(self) -> "Recipe":
        try:
            find_format(self.format)
        except UserError as error:
            raise ValueError(f"format: {error}") from None
        faults = [fault for check in (_check_steps, _check_splits, _check_method) for fault in check(self)]
        if faults:
            raise ValueError("; ".join(faults))
        return self


def _check_steps(recipe: Recipe) -> list[str]:
    faults = []
    warmup, decay = recipe.optimizer.warmup_steps, recipe.optimizer.decay_steps(recipe.steps)
    if warmup >= recipe.steps:
        faults.append(f"optimizer.warmup_steps ({warmup}) must be below steps ({recipe.steps})")
    elif recipe.optimizer.schedule == "wsd" and warmup + decay > recipe.steps:
        faults.append(
            f"optimizer.warmup_steps ({warmup}) and the {decay} steps of optimizer.decay_fraction "
            f"({recipe.optimizer.decay_fraction}) are more than steps ({recipe.steps})"
        )
    if recipe.batch_size % recipe.accumulate:
        faults.append(f"accumulate ({recipe.accumulate}) must divide batch_size ({recipe.batch_size})")
    profile = recipe.profile
    if profile.steps and profile.start + profile.steps - 1 > recipe.steps:
        faults.append(
            f"profile.start ({profile.start}) and profile.steps ({profile.steps}) lead past steps ({recipe.steps})"
        )
    return faults


def _check_splits(recipe: Recipe) -> list[str]:
    faults = []
    if recipe.eval_split in recipe.train_splits:
        faults.append(f"eval_split {recipe.eval_split!r} is trained on: set train_splits to train alone")
    needs = [name for name in ("patience", "keep_best") if getattr(recipe, name)]
    if not recipe.eval_every:
        faults += [f"{name} needs a monitored loss: set eval_every" for name in needs]
        return faults
    if recipe.eval_every > recipe.steps:
        faults.append(f"eval_every ({recipe.eval_every}) must not exceed steps ({recipe.steps})")
    if recipe.monitor_split in recipe.train_splits:
        faults.append(f"monitor_split {recipe.monitor_split!r} is trained on: set train_splits to train alone")
    if recipe.monitor_split == "test" and needs:
        faults.append(f"{needs[0]} would choose by the test split: set monitor_split to validation")
    return faults


def _check_method(recipe: Recipe) -> list[str]:
    if recipe.method == "lora":
        return []
    faults = []
    if recipe.lora.quantize != "none":
        faults.append(f"method full trains the weights that lora.quantize {recipe.lora.quantize} would freeze")
    if recipe.lora.start_from is not None:
        faults.append("method full has no adapter to go on from: remove lora.start_from, or give the folder as model")
    return faults


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
