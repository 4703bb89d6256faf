"""Twelve public GPU configurations, whole: the recipe loads, and recipe and report are those that are committed.

`PORTLAB_REWRITE_REPORTS=1 pytest packages/port/tests/test_port_configs.py` writes them anew, to be read in the diff.
"""

import os

import pytest
from port_cases import CASES, CONFIGS, REPORTS, config

from portlab_port.port import port
from portlab_port.read import read
from portlab_port.recipe_file import recipe_text
from portlab_port.report import markdown
from portlab_port.rules import RULES
from portlab_spec.recipe import load_recipe


@pytest.fixture(params=CASES)
def case(request):
    name = request.param
    devices, answers = CASES[name]
    gpu = read(config(name), name)
    return name, gpu, port(gpu, devices, answers)


def test_the_recipe_loads_and_says_what_was_meant(case, tmp_path):
    _, gpu, ported = case
    file = tmp_path / "recipe.yaml"
    file.write_text(recipe_text(ported, gpu))
    assert load_recipe(str(file)) == ported.recipe


def test_every_setting_has_one_note_and_nothing_is_unknown(case):
    _, gpu, ported = case
    assert sorted(id(note.setting) for note in ported.notes) == sorted(map(id, gpu.settings))
    assert not ported.unknown
    assert {note.setting.name for note in ported.notes} <= set(RULES)


def test_recipe_and_report_are_the_committed_ones(case):
    name, gpu, ported = case
    text = f"{markdown(ported, gpu)}\n## Recipe\n\n```yaml\n{recipe_text(ported, gpu)}```\n"
    committed = REPORTS / f"{name}.md"
    if os.environ.get("PORTLAB_REWRITE_REPORTS"):
        committed.write_text(text)
    assert text == committed.read_text()


def test_there_are_ten_configurations_of_all_styles():
    styles = {read(config(name), name).style for name in CASES}
    assert len(CASES) >= 10
    assert styles == {"trl", "axolotl", "llama-factory", "unsloth", "script", "command"}
    assert sorted(CASES) == sorted(file.name.removesuffix(".txt") for file in CONFIGS.iterdir())


# Worked out by hand from each configuration: examples in a step, steps, warm-up, rank, learning rate.
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("trl_sft.yaml", (4 * 2 * 4, 940, 29, 8, 2e-4)),  # ceil(15011 / 8) = 1877 batches, 470 updates, twice
        ("handbook_gemma_full.yaml", (4 * 8 * 4, 225, 23, None, 2e-5)),  # 297 batches of 32, 75 updates, 3 times
        ("axolotl_gemma3_qlora.yml", (4 * 4, 1250, 125, 32, 2e-4)),  # 3.5 examples are 4 a row; 5000 rows, by 4
        ("axolotl_gemma3_4b_lora.yml", (2 * 2 * 4, 310, 9, 32, 2e-4)),  # 1238 batches of 4, 310 updates; 3%
        ("llama_factory_gemma3.yaml", (1 * 4 * 8, 939, 94, 8, 1e-4)),  # 2500 batches of 4, 313 updates, 3 times
        ("unsloth_studio.yaml", (2 * 4, 30, 5, 8, 2e-4)),
        ("unsloth_gemma3_270m.py", (8, 100, 5, 128, 5e-5)),
        ("unsloth_functiongemma.py", (4 * 2, 100, 5, 16, 2e-4)),  # the batch is Unsloth's default
        ("gemma_qlora_guide.py", (4 * 4, 1875, 0, 16, 2e-4)),  # 2500 rows of 4 examples, 625 updates, 3 times
        ("fsdp_fitness.py", (4, 222, 0, 32, 1e-4)),  # SPMD: 4 over all devices; drop_last: 37 batches, 6 times
        ("transformers_fp16.py", (2 * 8, 400, 20, 64, 1e-4)),
        ("accelerate_sft.sh", (2 * 8 * 2, 500, 10, 32, 1e-4)),
    ],
)
def test_the_numbers(name, expected):
    devices, answers = CASES[name]
    recipe = port(read(config(name), name), devices, answers).recipe
    rank = recipe.lora.rank if recipe.method == "lora" else None
    optimizer = recipe.optimizer
    assert (recipe.batch_size, recipe.steps, optimizer.warmup_steps, rank, optimizer.learning_rate) == expected
