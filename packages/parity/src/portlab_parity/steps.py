"""AdamW in numpy, as the recipe means it and with the mistakes that backends make."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from portlab_spec.recipe import Optimizer

Array = np.ndarray
Tensors = Mapping[str, Array]


@dataclass(frozen=True)
class Adam:
    """Settings of a step.

    Attributes:
        b1, b2, eps, weight_decay: as in the recipe.
        clip: "norm" of all gradients together, "none", or "each" for every tensor by itself.
        clip_norm: the bound.
        corrected: whether moments are divided by what they lack of their weight in the first steps.
        decoupled: whether the decay is of the weights, not added to the gradient.
        eps_inside: whether eps is added under the root.
    """

    b1: float
    b2: float
    eps: float
    weight_decay: float
    clip_norm: float
    clip: str = "norm"
    corrected: bool = True
    decoupled: bool = True
    eps_inside: bool = False

    @staticmethod
    def of(settings: Optimizer) -> "Adam":
        """The recipe's."""
        return Adam(settings.b1, settings.b2, settings.eps, settings.weight_decay, settings.clip_norm)


def updates(start: Tensors, gradients: Sequence[Tensors], rates: Sequence[float], adam: Adam) -> dict[str, Array]:
    """What steps change in all, by tensor, in float64.

    Args:
        start: the adapter before the first.
        gradients: of each step, before clipping.
        rates: learning rate of each step.
        adam: settings.
    """
    mean = {name: np.zeros(x.shape) for name, x in start.items()}
    square = {name: np.zeros(x.shape) for name, x in start.items()}
    value = {name: x.astype(np.float64) for name, x in start.items()}
    for step, (grads, rate) in enumerate(zip(gradients, rates, strict=True), 1):
        total = np.sqrt(sum(np.square(g, dtype=np.float64).sum() for g in grads.values()))
        for name, grad in grads.items():
            g = grad.astype(np.float64)
            size = total if adam.clip == "norm" else np.sqrt(np.square(g).sum())
            if adam.clip != "none":
                g = g * min(1.0, adam.clip_norm / max(size, 1e-30))
            if not adam.decoupled:
                g = g + adam.weight_decay * value[name]
            mean[name] = adam.b1 * mean[name] + (1 - adam.b1) * g
            square[name] = adam.b2 * square[name] + (1 - adam.b2) * g * g
            m, v = mean[name], square[name]
            if adam.corrected:
                m, v = m / (1 - adam.b1**step), v / (1 - adam.b2**step)
            down = np.sqrt(v + adam.eps) if adam.eps_inside else np.sqrt(v) + adam.eps
            change = m / np.where(down == 0, 1, down)
            if adam.decoupled:
                change = change + adam.weight_decay * value[name]
            value[name] = value[name] - rate * change
    return {name: value[name] - x for name, x in start.items()}
