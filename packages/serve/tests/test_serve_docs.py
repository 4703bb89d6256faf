"""What docs/serving.md shows is what the program prints."""

import re
import textwrap
from pathlib import Path

import pytest
from serving_folders import Model

from portlab_serve import cli
from portlab_spec.errors import CheckFailed
from portlab_spec.files import read_json, write_json

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


def test_the_figures_of_served_models_are_those_of_the_run():
    figures = read_json(Path(__file__).parents[3] / "bench" / "results" / "serve_cpu.json")["figures"]
    for name, c in figures["parsers"].items():
        if not isinstance(c, dict):  # when and of which commit
            continue
        right, wrong, known = (c[key] for key in ("outputs read right", "calls nobody wrote", "fixtures read right"))
        fixtures = [f"{known[m]} of {c['fixtures']}" if c["fixtures"] else "-" for m in ("whole", "streamed")]
        read = [f"{right[m]} of {c['outputs']}" for m in ("whole", "streamed")]
        cells = [name, *read, str(wrong["whole"]), str(wrong["streamed"]), *fixtures]
        assert f"| {' | '.join(cells)} |" in PAGE
    for name, scores in figures["scores"].items():
        if isinstance(scores, dict):
            metrics = ("call_exact", "name_accuracy", "schema_valid_rate", "hallucinated_tool_rate")
            cells = [name, *("{} of {}".format(*scores[metric]) for metric in metrics)]
            assert f"| {' | '.join(cells)} |" in PAGE
    chat = figures["chat"]
    assert f"{chat['right']} of {chat['turns']} turns call the right tool" in PAGE
