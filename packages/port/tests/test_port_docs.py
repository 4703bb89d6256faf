"""The manual's example and table are what the program prints.

`PORTLAB_REWRITE_REPORTS=1 pytest packages/port/tests/test_port_docs.py` writes them anew, to be read in the diff.
"""

import os
import re
from pathlib import Path

import pytest

from portlab_port.build import Answers
from portlab_port.port import port
from portlab_port.read import read
from portlab_port.recipe_file import recipe_text
from portlab_port.report import markdown, rules_table
from portlab_spec.errors import UserError

MANUAL = Path(__file__).parents[3] / "docs" / "porting-recipes.md"
EXAMPLE = re.compile(r"`sft\.yaml`:\n\n```yaml\n(.*?)```\n.*?```text\n(.*?)```\n.*?```yaml\n(.*?)```\n", re.DOTALL)
TABLE = re.compile(r"<!-- rules: [^>]*-->\n(.*?)<!-- /rules -->", re.DOTALL)


def hold(pattern, texts):
    """The manual's parts are these texts; rewrites them if asked to."""
    manual = MANUAL.read_text()
    found = pattern.search(manual)
    assert found, pattern.pattern
    groups = found.groups()[-len(texts) :]
    if os.environ.get("PORTLAB_REWRITE_REPORTS") and groups != tuple(texts):
        whole = found[0]
        for old, new in zip(groups, texts, strict=True):
            whole = whole.replace(old, new, 1)
        MANUAL.write_text(manual.replace(found[0], whole))
        groups = tuple(texts)
    assert groups == tuple(texts)


def test_the_example():
    found = EXAMPLE.search(MANUAL.read_text())
    gpu = read(found[1], "sft.yaml")
    ported = port(gpu, 2, Answers(rows=4000, name="recipe"))
    hold(EXAMPLE, [markdown(ported, gpu), recipe_text(ported, gpu)])
    assert "portlab-port sft.yaml --devices 2 --rows 4000" in MANUAL.read_text()


def test_the_table_of_rules():
    hold(TABLE, ["\n" + rules_table() + "\n"])


def test_the_error_of_a_script():
    text = """from trl import SFTConfig, SFTTrainer
from data import longest, rows

model = "google/gemma-3-1b-it"
rate = 2e-4

config = SFTConfig(
    learning_rate=rate, max_steps=100,
    max_length=longest(rows),
)
trainer = SFTTrainer(model=model, args=config, train_dataset=rows)
"""
    with pytest.raises(UserError) as caught:
        port(read(text, "train.py"), 1, Answers(data="rows.jsonl"))
    assert f"portlab-port: error: {caught.value}\n" in MANUAL.read_text()


def test_every_option_of_the_manual_exists():
    source = (Path(__file__).parents[1] / "src" / "portlab_port" / "cli.py").read_text()
    for option in set(re.findall(r"`--([a-z_-]+)", MANUAL.read_text())) - {"device", "num_processes", "nproc_per_node"}:
        assert re.search(rf"^    {option.replace('-', '_')}: ", source, re.MULTILINE), option
