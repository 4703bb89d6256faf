"""The masks that make packed rows mean what their examples mean, ready-made for transformers' models."""

from typing import Any

import torch


def visible(ends: torch.Tensor, positions: torch.Tensor, window: int | None) -> torch.Tensor:
    """Bool (rows, 1, T, T): token i sees token j, for every head alike.

    Every token sees itself, padding too: a softmax over nothing is not a number.

    Args:
        ends: integers (rows, T), one past the last token that may see this one; 0 at padding.
        positions: integers (rows, T).
        window: only j with positions[i] - positions[j] < window are seen.
    """
    index = torch.arange(ends.shape[-1], device=ends.device)
    i, j = index[:, None], index[None, :]
    mask = (j <= i) & (i < ends[:, None, :])
    if window is not None:
        mask = mask & (positions[:, :, None] - positions[:, None, :] < window)
    return (mask | (i == j))[:, None]


def attention_masks(ends: torch.Tensor, positions: torch.Tensor, window: int | None) -> dict[str, torch.Tensor]:
    """The mask of each kind of layer, as transformers' Gemmas take them ready-made."""
    masks = {"full_attention": visible(ends, positions, None)}
    if window is not None:
        masks["sliding_attention"] = visible(ends, positions, window)
    return masks


def for_model(base: Any, masks: dict[str, torch.Tensor]) -> dict[str, torch.Tensor] | torch.Tensor:
    """The masks as a model wants them: by kind of layer, or the only one there is.

    A model whose config tells its layers apart takes them by kind. The others, Llama and Mistral among them, take one:
    of the window if they have one, since then every layer has it.
    """
    if getattr(base.config.get_text_config(), "layer_types", None):
        return masks
    return masks.get("sliding_attention", masks["full_attention"])
