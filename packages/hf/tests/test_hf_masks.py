"""Masks of packed rows: what a token sees, and how a model wants to be told."""

import pytest
import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)

from portlab_hf.masks import attention_masks, for_model, visible

SIZES = {"vocab_size": 16, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
# Two examples that share two tokens, then padding: a tree laid out depth first.
ENDS = torch.tensor([[5, 5, 4, 4, 5, 0]])
POSITIONS = torch.tensor([[0, 1, 2, 3, 2, 0]])


def seen(mask: torch.Tensor) -> list[list[int]]:
    return [[j for j, visible in enumerate(row) if visible] for row in mask[0, 0].tolist()]


def test_a_token_sees_what_its_example_holds_before_it():
    assert seen(visible(ENDS, POSITIONS, None)) == [[0], [0, 1], [0, 1, 2], [0, 1, 2, 3], [0, 1, 4], [5]]


def test_a_window_counts_positions_within_the_example():
    assert seen(visible(ENDS, POSITIONS, 2)) == [[0], [0, 1], [1, 2], [2, 3], [1, 4], [5]]


@pytest.mark.parametrize("window", [None, 1, 3])
def test_every_token_sees_itself(window):
    assert visible(torch.zeros_like(ENDS), POSITIONS, window).diagonal(dim1=-2, dim2=-1).all()


def test_a_model_that_tells_its_layers_apart_gets_a_mask_for_each_kind():
    base = Gemma3ForCausalLM(Gemma3TextConfig(**SIZES, head_dim=4, num_key_value_heads=1))
    found = for_model(base, attention_masks(ENDS, POSITIONS, 2))
    assert isinstance(found, dict)
    assert set(found) == {"full_attention", "sliding_attention"}


@pytest.mark.parametrize(
    ("base", "window", "expected"),
    [
        (LlamaForCausalLM(LlamaConfig(**SIZES)), None, None),
        (MistralForCausalLM(MistralConfig(**SIZES, num_key_value_heads=1, sliding_window=2)), 2, 2),
    ],
    ids=["llama", "mistral with a window"],
)
def test_a_model_whose_layers_are_alike_gets_one_mask(base, window, expected):
    found = for_model(base, attention_masks(ENDS, POSITIONS, window))
    torch.testing.assert_close(found, visible(ENDS, POSITIONS, expected))
