"""What of a recipe this trainer does: everything else is refused before anything is loaded."""

from collections.abc import Sequence

from portlab_spec.errors import UserError
from portlab_spec.models import AdapterLeaf
from portlab_spec.recipe import Recipe

REMAT = ("none", "block")


def require_supported(recipe: Recipe) -> None:
    """Refuse what a recipe asks for and this trainer does not have.

    Raises:
        UserError: names every key, with what to set instead.
    """
    faults = []
    if recipe.method != "lora":
        faults.append(f"method {recipe.method} (set lora)")
    if recipe.lora.quantize != "none":
        faults.append(f"lora.quantize {recipe.lora.quantize} (set none)")
    if recipe.remat not in REMAT:
        faults.append(f"remat {recipe.remat} (set {' or '.join(REMAT)})")
    if recipe.attention not in ("auto", "xla"):
        faults.append(f"attention {recipe.attention} (set auto)")
    if recipe.profile.steps:
        faults.append("profile.steps (set 0)")
    if faults:
        raise UserError(
            f"train-xla does not do what the recipe asks for: {', '.join(faults)}",
            where=f"recipe {recipe.name}",
            fix="Change these, or run it with train-jax",
        )


def require_supported_adapter(recipe: Recipe, leaves: Sequence[AdapterLeaf]) -> None:
    """Refuse what PEFT's adapters of experts cannot do: it holds those of a layer's experts in one pair of matrices.

    Raises:
        UserError: names the key, with what to set instead.
    """
    if not any(leaf.experts for leaf in leaves):
        return
    faults = []
    if recipe.lora.dropout:
        faults.append(f"lora.dropout {recipe.lora.dropout:g} (set 0)")
    if recipe.optimizer.name == "adafactor":
        faults.append("optimizer.name adafactor, whose statistics would mix the experts (set adamw)")
    if faults:
        raise UserError(
            f"train-xla does not do beside adapters of experts: {', '.join(faults)}",
            where=f"recipe {recipe.name}",
            fix="Change these, leave the experts out of lora.targets, or run it with train-jax",
        )
