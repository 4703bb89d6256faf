"""Models that train-xla does not take are refused before anything is opened."""

import json

import pytest

from portlab_spec.assets import ModelFolder
from portlab_spec.errors import UserError
from portlab_spec.recipe import Recipe
from portlab_xla.setup import set_up


def test_a_model_of_another_family_is_refused_by_name(tmp_path):
    sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mistral"} | dict.fromkeys(sizes, 4)))
    with pytest.raises(UserError, match=r"model: train-xla trains Gemma alone, .* the family mistral") as no:
        set_up(Recipe(), ModelFolder(tmp_path, str(tmp_path), None), (), "cpu")
    assert "Run the recipe with train-torchax" in str(no.value)
