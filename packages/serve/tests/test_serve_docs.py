"""What docs/serving.md shows is what the program prints."""

import re
import textwrap
from pathlib import Path

import pytest
from serving_folders import Model

from portlab_serve import cli
from portlab_spec.errors import CheckFailed
from portlab_spec.files import write_json

PAGE = (Path(__file__).parents[3] / "docs" / "serving.md").read_text(encoding="utf-8")


def test_the_preflight_prints_what_the_page_shows(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    model = Model(Path("merged"), "functiongemma-270m", "Gemma3ForConditionalGeneration", "model.", "functiongemma")
    (model.path / "processor_config.json").unlink()
    write_json(model.path / "generation_config.json", {"eos_token_id": [1]})
    block = re.search(r"(?:    .*\n)*    \$ portlab-serve merged .*\n((?:    .*\n)+)", PAGE)
    assert block
    with pytest.raises(CheckFailed) as raised:
        cli.main(["merged", "--target", "vllm-tpu", "--preflight-only"])
    assert textwrap.dedent(block[1]) == f"{capsys.readouterr().out}portlab-serve: error: {raised.value}\n"


def test_every_option_of_the_program_is_on_the_page():
    for name in cli.Options.__dataclass_fields__:
        assert f"`--{name.replace('_', '-')}`" in PAGE


@pytest.mark.parametrize("check", ["config", "architecture", "weights", "head", "tokenizer", "stops", "processor"])
def test_every_check_is_on_the_page(check):
    assert f"\n| {check} | " in PAGE
