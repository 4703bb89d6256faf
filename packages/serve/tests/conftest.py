"""Models as they are published, made tiny."""

from pathlib import Path

import pytest
from serving_folders import Model

MULTIMODAL4 = ("Gemma4ForConditionalGeneration", "model.language_model.", "gemma4")


@pytest.fixture
def functiongemma(tmp_path: Path) -> Model:
    return Model(tmp_path / "fg", "functiongemma-270m", "Gemma3ForCausalLM", "model.", "functiongemma")


@pytest.fixture
def gemma3_4b(tmp_path: Path) -> Model:
    nested = "model.language_model."
    return Model(tmp_path / "g3", "gemma-3-4b", "Gemma3ForConditionalGeneration", nested, "gemma3-json")


@pytest.fixture
def gemma4_31b(tmp_path: Path) -> Model:
    return Model(tmp_path / "g4", "gemma-4-31B", *MULTIMODAL4)


@pytest.fixture
def gemma4_e2b(tmp_path: Path) -> Model:
    return Model(tmp_path / "e2b", "gemma-4-E2B", *MULTIMODAL4)


@pytest.fixture
def gemma4_26b(tmp_path: Path) -> Model:
    return Model(tmp_path / "moe", "gemma-4-26B-A4B", *MULTIMODAL4)
