"""What of a recipe this trainer does: everything else is refused before anything is loaded."""

from portlab_spec.errors import UserError
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
