"""Published configurations: they give the parameters that the models have."""

import math

import pytest

from portlab_spec.models import param_table
from portlab_spec.models.published import published_config, published_models


def size(config, where=lambda param: True):
    return sum(math.prod(p.shape) * p.count for p in param_table(config) if where(p))


# Text parameters: the safetensors index on the Hub, less the vision tower and projector where there is one.
@pytest.mark.parametrize(
    ("model", "parameters"),
    [
        ("google/gemma-3-270m", 268_098_176),
        ("google/gemma-3-1b-pt", 999_885_952),
        ("google/gemma-3-4b-pt", 4_300_079_472 - 416_866_032 - 2_950_272),
        ("google/gemma-3-12b-pt", 12_187_325_040 - 416_866_032 - 4_424_832),
        ("google/gemma-3-27b-pt", 27_432_406_640 - 416_866_032 - 6_194_304),
    ],
)
def test_gemma_3_has_the_parameters_of_its_checkpoints(model, parameters):
    assert size(published_config(model)) == parameters


@pytest.mark.parametrize(
    ("model", "embedding", "other"),  # millions; Gemma 3 report, table 1
    [("gemma-3-1b", 302, 698), ("gemma-3-4b", 675, 3209), ("gemma-3-12b", 1012, 10_759), ("gemma-3-27b", 1416, 25_600)],
)
def test_gemma_3_splits_into_embedding_and_other_as_reported(model, embedding, other):
    config = published_config(model)
    table = config.vocab_size * config.hidden_size
    assert table == pytest.approx(embedding * 1e6, rel=0.006)  # the report counts some rows more
    assert size(config) - table == pytest.approx(other * 1e6, abs=0.6e6)


@pytest.mark.parametrize(
    ("model", "billions"),
    [
        ("gemma-4-E2B", 5.1 - 0.15 - 0.3),  # less vision and audio encoder
        ("gemma-4-E4B", 8.0 - 0.15 - 0.3),
        ("gemma-4-12B", 11.95),  # no encoders, small projections
        ("gemma-4-26B-A4B", 25.2),
        ("gemma-4-31B", 30.7),
    ],
)
def test_gemma_4_has_the_parameters_of_its_model_card(model, billions):
    # The cards round, and the E models ship keys and values that no layer uses.
    assert size(published_config(model)) / 1e9 == pytest.approx(billions, abs=0.1)


def test_effective_parameters_leave_out_the_per_layer_embedding():
    config = published_config("gemma-4-E2B")
    assert round(size(config, lambda p: "embed_tokens_per_layer" not in p.name) / 1e9, 1) == 2.3  # model card


def test_the_mixture_activates_the_parameters_of_its_model_card():
    config = published_config("gemma-4-26B-A4B")
    experts = size(config, lambda p: p.name.startswith("experts."))
    idle = experts * (1 - config.experts.top_k / config.experts.count)
    assert round((size(config) - idle) / 1e9, 1) == 3.8


def test_every_listed_model_has_a_configuration():
    assert len(published_models()) == 11
    for model in published_models():
        assert published_config(model).num_hidden_layers > 0


@pytest.mark.parametrize(
    "spelling",
    ["google/gemma-4-31B-it", "google/gemma-4-31b", "gemma-4-31B", "GOOGLE/GEMMA-4-31B-PT", " gemma-4-31b-it "],
)
def test_ids_are_read_in_any_case_and_with_any_suffix(spelling):
    assert published_config(spelling).num_hidden_layers == 60


def test_functiongemma_is_the_270m_model():
    assert published_config("google/functiongemma-270m-it") == published_config("google/gemma-3-270m")


@pytest.mark.parametrize("model", ["google/gemma-2-2b", "google/gemma-3-270m-it-qat", "someone/gemma-3-270m", "", "."])
def test_other_models_have_none(model):
    assert published_config(model) is None
