"""What holds for every recipe, not for examples alone."""

import contextlib
import math
import random

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from port_cases import CASES, config

from portlab_port.build import Answers
from portlab_port.dialects import DIALECTS
from portlab_port.port import port
from portlab_port.read import read
from portlab_port.recipe_file import recipe_text
from portlab_port.report import as_json, markdown
from portlab_spec.errors import UserError
from portlab_spec.recipe import Recipe

QUICK = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])

_NAMES = st.sampled_from(
    ["auto", "none", "steps", "epoch", "adamw_torch", "cosine", "linear", "q_proj", "all-linear", "a/b", ""]
)
_LEAVES = st.one_of(
    st.none(), st.booleans(), st.integers(-2, 4096), st.floats(0, 2, allow_nan=False), _NAMES, st.text(max_size=8)
)
_VALUES = st.one_of(
    _LEAVES, st.lists(_LEAVES, max_size=3), st.dictionaries(st.text("abc_", max_size=4), _LEAVES, max_size=3)
)
_BASE = {
    "trl": {"model_name_or_path": "google/gemma-3-1b-it", "dataset_name": "rows.jsonl", "use_peft": True,
            "max_steps": 50},
    "axolotl": {"base_model": "google/gemma-3-1b-it", "datasets": [{"path": "rows.jsonl"}], "adapter": "lora",
                "lora_r": 8, "lora_alpha": 16, "learning_rate": 1e-4, "max_steps": 50},
    "llama-factory": {"model_name_or_path": "google/gemma-3-1b-it", "dataset": "rows.jsonl", "max_steps": 50},
    "unsloth": {"model_name": "google/gemma-3-1b-it", "dataset": "rows.jsonl", "max_steps": 50},
}  # fmt: skip


@pytest.mark.parametrize("style", DIALECTS)
@QUICK
@given(data=st.data())
def test_any_keys_give_a_recipe_that_loads_or_one_clear_line(style, data):
    keys = data.draw(st.lists(st.sampled_from(sorted(DIALECTS[style].keys)), max_size=8, unique=True))
    raw = _BASE[style] | {key: data.draw(_VALUES, label=key) for key in keys}
    try:
        gpu = read(yaml.safe_dump(raw), "any.yaml", style)
        ported = port(gpu, 2, Answers(rows=1000, examples_per_row=2))
    except UserError:
        return
    text = recipe_text(ported, gpu)
    assert Recipe.model_validate(yaml.safe_load(text)) == ported.recipe
    assert len(ported.notes) == len(gpu.settings)
    assert as_json(ported, gpu)["counts"]["not understood"] == 0


@pytest.mark.parametrize("name", [name for name in CASES if name.endswith(("yaml", "yml"))])
@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 2**16))
def test_the_order_of_keys_does_not_matter(name, seed):
    devices, answers = CASES[name]
    text = config(name)
    raw = yaml.safe_load(text)
    keys = list(raw)
    random.Random(seed).shuffle(keys)
    whole = [
        read(t, name)
        for t in (yaml.safe_dump(raw, sort_keys=False), yaml.safe_dump({k: raw[k] for k in keys}, sort_keys=False))
    ]
    first, second = (port(gpu, devices, answers) for gpu in whole)
    assert first.recipe == second.recipe
    assert markdown(first, whole[0]) == markdown(second, whole[1])


@st.composite
def runs(draw):
    """A run that every dialect can say."""
    return {
        "rate": draw(st.sampled_from([1e-5, 2e-4, 3e-3])),
        "schedule": draw(st.sampled_from(["linear", "cosine"])),
        "warmup": draw(st.integers(2, 9)),
        "steps": draw(st.integers(10, 500)),
        "batch": draw(st.integers(1, 16)),
        "parts": draw(st.integers(1, 8)),
        "rank": draw(st.integers(1, 64)),
        "alpha": draw(st.integers(1, 64)),
        "dropout": draw(st.sampled_from([0.0, 0.05])),
        "targets": draw(st.lists(st.sampled_from(["q_proj", "v_proj", "up_proj"]), min_size=1, unique=True)),
        "length": draw(st.integers(8, 4096)),
        "decay": draw(st.sampled_from([0.0, 0.01])),
        "norm": draw(st.sampled_from([0.3, 1.0])),
        "seed": draw(st.integers(0, 9999)),
        "remat": draw(st.booleans()),
    }


def _trainer(run, **names):
    plain = {
        "learning_rate": run["rate"], "lr_scheduler_type": run["schedule"], "warmup_steps": run["warmup"],
        "max_steps": run["steps"], "per_device_train_batch_size": run["batch"],
        "gradient_accumulation_steps": run["parts"],
        "weight_decay": run["decay"], "max_grad_norm": run["norm"], "seed": run["seed"], "bf16": True,
        "gradient_checkpointing": run["remat"], "optim": "adamw_torch", "max_length": run["length"], "packing": False,
    }  # fmt: skip
    return {names.get(key, key): value for key, value in plain.items()}


def _dialects(run):
    model, rows = "google/gemma-3-1b-it", "rows.jsonl"
    lora = {"lora_alpha": run["alpha"], "lora_dropout": run["dropout"]}
    trl = _trainer(run) | lora | {
        "model_name_or_path": model, "dataset_name": rows, "use_peft": True, "lora_r": run["rank"],
        "lora_target_modules": run["targets"],
    }  # fmt: skip
    yield "run.yaml", yaml.safe_dump(trl)
    axolotl = _trainer(run, lr_scheduler_type="lr_scheduler", per_device_train_batch_size="micro_batch_size",
                       optim="optimizer", max_length="sequence_len", packing="sample_packing")  # fmt: skip
    yield "run.yaml", yaml.safe_dump(axolotl | lora | {
        "base_model": model, "datasets": [{"path": rows}], "adapter": "lora", "lora_r": run["rank"],
        "lora_target_modules": run["targets"], "excess_length_strategy": "raise",
    })  # fmt: skip
    factory = _trainer(run, max_length="cutoff_len", gradient_checkpointing="disable_gradient_checkpointing")
    factory["disable_gradient_checkpointing"] = not run["remat"]
    yield "run.yaml", yaml.safe_dump(factory | lora | {
        "model_name_or_path": model, "dataset": rows, "finetuning_type": "lora", "lora_rank": run["rank"],
        "lora_target": ",".join(run["targets"]), "template": "gemma3", "stage": "sft",
    })  # fmt: skip
    unsloth = _trainer(run, max_length="max_seq_length")
    yield "run.yaml", yaml.safe_dump({
        "model": {"model_name": model, "load_in_4bit": False}, "dataset": {"name": rows},
        "lora": lora | {"lora_r": run["rank"], "target_modules": run["targets"]}, "training": unsloth,
    })  # fmt: skip
    arguments = ", ".join(f"{key}={value!r}" for key, value in _trainer(run).items())
    yield (
        "run.py",
        (
            f"SFTTrainer(model={model!r}, args=SFTConfig({arguments}), "
            f"train_dataset=load_dataset('json', data_files={rows!r}), "
            f"peft_config=LoraConfig(r={run['rank']}, target_modules={run['targets']!r}, lora_alpha={run['alpha']}, "
            f"lora_dropout={run['dropout']}))"
        ),
    )
    words = " ".join(f"--{key} {' '.join(value) if isinstance(value, list) else value}" for key, value in trl.items())
    yield "run.sh", f"accelerate launch --num_processes 1 sft.py {words}"


@QUICK
@given(run=runs())
def test_one_run_in_six_dialects_is_one_recipe(run):
    recipes = []
    styles = set()
    for name, text in _dialects(run):
        gpu = read(text, name)
        assert not gpu.unknown
        styles.add(gpu.style)
        recipes.append(port(gpu, 1).recipe)
    assert len(styles) == 6
    assert all(recipe == recipes[0] for recipe in recipes)
    optimizer = recipes[0].optimizer
    assert (recipes[0].batch_size, recipes[0].accumulate) == (run["batch"] * run["parts"], run["parts"])
    assert (optimizer.warmup_steps, optimizer.learning_rate) == (run["warmup"], run["rate"])
    assert recipes[0].remat == ("block" if run["remat"] else "none")


@QUICK
@given(
    rows=st.integers(1, 5000), batch=st.integers(1, 9), parts=st.integers(1, 5), devices=st.integers(1, 8),
    epochs=st.sampled_from([0.5, 1, 2.5, 3]), drop=st.booleans(),
)  # fmt: skip
def test_steps_are_those_that_a_loop_over_batches_counts(rows, batch, parts, devices, epochs, drop):
    text = yaml.safe_dump({
        "model_name_or_path": "google/gemma-3-1b-it", "dataset_name": "r.jsonl", "num_train_epochs": epochs,
        "per_device_train_batch_size": batch, "gradient_accumulation_steps": parts, "dataloader_drop_last": drop,
    })  # fmt: skip
    updates = batches = 0
    left = rows
    while left > 0 and (left >= batch * devices or not drop):
        left -= batch * devices
        batches += 1
        updates += batches % parts == 0
    updates += batches % parts > 0
    recipe = port(read(text, "a.yaml"), devices, Answers(rows=rows)).recipe
    assert recipe.batch_size == batch * parts * devices
    assert recipe.steps == max(math.ceil(epochs * max(updates, 1)), 1)


@pytest.mark.parametrize("name", CASES)
@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**20))
def test_damaged_files_end_in_one_clear_line_or_a_recipe(name, seed):
    pick = random.Random(seed)
    text = config(name)
    for _ in range(pick.randint(1, 3)):
        at = pick.randrange(len(text))
        match pick.randrange(3):
            case 0:
                text = text[:at] + text[at + pick.randint(1, 40) :]
            case 1:
                text = text[:at] + pick.choice("\0:,[]{}()'\"=#\n-0x") + text[at:]
            case _:
                lines = text.splitlines()
                pick.shuffle(lines) if pick.random() < 0.2 else lines.pop(pick.randrange(len(lines)))
                text = "\n".join(lines) + "\n"
    devices, answers = CASES[name]
    with contextlib.suppress(UserError):
        gpu = read(text, name)
        recipe_text(port(gpu, devices, answers), gpu)
