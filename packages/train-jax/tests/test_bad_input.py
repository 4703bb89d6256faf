"""Bad input of train-jax: one clear line, the right exit code, nothing written."""

import json
import shutil

import pytest

from portlab_jax import cli as train_cli
from portlab_spec import cli


@pytest.fixture
def refused(capsys, tmp_path, monkeypatch):
    """Run train-jax in this process and return its one line of complaint."""
    monkeypatch.chdir(tmp_path)
    out = tmp_path / "out"

    def call(*args):
        with pytest.raises(SystemExit) as end:
            cli.run("train-jax", train_cli.main, [*args, "--out", str(out)])
        captured = capsys.readouterr()
        assert end.value.code == 2, captured.err
        assert captured.err.startswith("train-jax: error: ")
        assert captured.err.count("\n") == 1
        assert not out.exists()
        return captured.err

    return call


def recipe(tmp_path, text):
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    return str(path)


def data(tmp_path, *rows):
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


TOOL = {"name": "get_steps", "description": "Steps.", "parameters": {"type": "object", "properties": {}}}


def conversation(id, split, text="How many?"):
    call = {"role": "assistant", "tool_calls": [{"name": "get_steps", "arguments": {}}]}
    user = {"role": "user", "content": text}
    return {"id": id, "split": split, "tools": [TOOL], "messages": [user, call]}


def test_unknown_recipe(refused):
    assert "no recipe 'nope'" in refused("--recipe", "nope")


def test_unknown_recipe_key_names_the_nearest(refused, tmp_path):
    line = refused("--recipe", recipe(tmp_path, "lora:\n  rnak: 8\n"))
    assert "unknown key 'lora.rnak' (did you mean 'lora.rank'?)" in line
    assert "recipe.yaml" in line


def test_wrong_type_and_range(refused, tmp_path):
    assert "lora.rank" in refused("--recipe", recipe(tmp_path, "lora:\n  rank: many\n"))
    assert "steps" in refused("--recipe", recipe(tmp_path, "steps: 0\n"))


def test_impossible_combination(refused, tmp_path):
    line = refused("--recipe", recipe(tmp_path, "steps: 5\noptimizer:\n  warmup_steps: 9\n"))
    assert "optimizer.warmup_steps (9) must be below steps (5)" in line


def test_scoring_a_split_that_is_trained_on(refused):
    line = refused("--eval-split", "validation")
    assert "is trained on: set train_splits to train alone" in line


def test_recipe_that_is_not_yaml(refused, tmp_path):
    assert "not YAML" in refused("--recipe", recipe(tmp_path, "a: [1\n"))
    assert "mapping" in refused("--recipe", recipe(tmp_path, "- 1\n"))


def test_missing_data_file(refused, tiny_chat_folder):
    line = refused("--model", str(tiny_chat_folder), "--data", "missing.jsonl")
    assert "missing.jsonl" in line


def test_empty_data_set(refused, tmp_path, tiny_chat_folder):
    line = refused("--model", str(tiny_chat_folder), "--data", data(tmp_path))
    assert "data.jsonl" in line


def test_no_training_rows(refused, tmp_path, tiny_chat_folder):
    line = refused("--model", str(tiny_chat_folder), "--data", data(tmp_path, conversation("a", "test")))
    assert "no conversations to train on" in line


def test_no_held_out_rows(refused, tmp_path, tiny_chat_folder):
    line = refused("--model", str(tiny_chat_folder), "--data", data(tmp_path, conversation("a", "train")))
    assert "no test rows" in line


def test_a_row_whose_answer_would_be_cut_off(refused, tiny_chat_folder):
    line = refused("--model", str(tiny_chat_folder), "--max-length", "300")
    assert "its answer would be cut off" in line
    assert "Set max_length to" in line


def test_a_target_that_matches_nothing(refused, tiny_chat_folder):
    line = refused("--model", str(tiny_chat_folder), "--lora.targets", "q_proj", "w_proj")
    assert "'w_proj' matches no linear layer" in line
    assert "gate_proj" in line


def test_missing_and_incomplete_models(refused, tmp_path):
    assert "nowhere" in refused("--model", str(tmp_path / "nowhere"))
    (tmp_path / "empty").mkdir()
    assert "config.json" in refused("--model", str(tmp_path / "empty"))


def test_a_mesh_that_does_not_fit_the_devices(refused, tiny_chat_folder):
    assert "mesh" in refused("--model", str(tiny_chat_folder), "--mesh.fsdp", "3")


def test_a_kernel_of_another_device(refused, tiny_chat_folder):
    line = refused("--model", str(tiny_chat_folder), "--attention", "cudnn")
    assert "cudnn cannot be used here: it runs on GPU, this is CPU" in line
    assert "Set attention to auto or xla" in line


def test_rows_longer_than_the_models_positions(refused, tiny_chat_folder):
    line = refused("--model", str(tiny_chat_folder), "--max-length", "40000")
    assert "max_length 40000 is more than the 32768 positions of the model" in line


def test_a_model_of_another_family(refused, tmp_path, tiny_chat_folder):
    shutil.copytree(tiny_chat_folder, tmp_path / "llama")
    config = tmp_path / "llama" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"model_type": "llama"}))
    line = refused("--model", str(tmp_path / "llama"))
    assert "model: train-jax computes Gemma's layers itself and has none of llama" in line
    assert "Run the recipe with train-torchax" in line


def test_a_folder_that_is_not_a_run(capsys, tmp_path, tiny_chat_folder):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").write_text("precious")
    with pytest.raises(SystemExit) as end:
        cli.run("train-jax", train_cli.main, ["--model", str(tiny_chat_folder), "--out", str(tmp_path / "out")])
    assert end.value.code == 2
    assert "holds no run" in capsys.readouterr().err
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["thesis.tex"]


def test_unknown_option_is_bad_usage(capsys):
    with pytest.raises(SystemExit) as end:
        cli.run("train-jax", train_cli.main, ["--lora.rnak", "8"])
    assert end.value.code == 2
    assert "lora.rank" in capsys.readouterr().err
