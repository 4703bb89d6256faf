"""What of a recipe this trainer does: everything else is refused before anything is loaded."""

from collections.abc import Sequence

from portlab_spec.errors import UserError
from portlab_spec.models import AdapterLeaf, GemmaConfig
from portlab_spec.recipe import Recipe
from portlab_torchax import TRAINER


def require_supported(
    recipe: Recipe, config: GemmaConfig, leaves: Sequence[AdapterLeaf], token_ids: Sequence[int]
) -> None:
    """Refuse what a recipe asks for and this trainer does not have.

    Args:
        recipe: the run.
        config: its model.
        leaves: what is adapted.
        token_ids: rows of the embedding that are trained by themselves.

    Raises:
        UserError: names every key, with what to set instead.
    """
    faults = []
    if recipe.lora.quantize != "none":
        faults.append(f"lora.quantize {recipe.lora.quantize} (set none)")
    if recipe.attention not in ("auto", "xla"):
        faults.append(f"attention {recipe.attention} (set auto)")
    if recipe.profile.steps:
        faults.append("profile.steps (set 0)")
    if token_ids and not config.tie_word_embeddings:
        faults.append("lora.train_control_rows of a model whose head is apart from its embedding (set false)")
    if any(leaf.experts for leaf in leaves):
        # PEFT holds the adapters of a layer's experts in one pair of matrices.
        if recipe.lora.dropout:
            faults.append(f"lora.dropout {recipe.lora.dropout:g} beside adapters of experts (set 0)")
        if recipe.optimizer.name == "adafactor":
            faults.append("optimizer.name adafactor beside adapters of experts, which it would mix (set adamw)")
    if config.experts and recipe.method == "full" and recipe.optimizer.name == "adafactor":
        faults.append("optimizer.name adafactor for all weights of experts, which it would mix (set adamw)")
    if recipe.max_length > config.max_position_embeddings:
        raise UserError(
            f"max_length {recipe.max_length} is more than the {config.max_position_embeddings} positions of the model",
            where="max_length",
            fix="Set it lower; too_long says what becomes of longer rows",
        )
    if faults:
        raise UserError(
            f"{TRAINER} does not do what the recipe asks for: {', '.join(faults)}",
            where=f"recipe {recipe.name}",
            fix="Change these" + (", or run it with train-jax" if config.is_gemma else ""),
        )
