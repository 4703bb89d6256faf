"""The recipe's optimiser and learning rate, in PyTorch.

Both are train-jax's: decoupled weight decay, a schedule whose first step is above zero, and an Adafactor without a
first moment and without steps relative to the weights. PyTorch's fused kernels do not exist on XLA, and none is used.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from portlab_spec.recipe import Optimizer as Settings
from portlab_spec.schedule import learning_rates

ADAFACTOR_DECAY = 0.8  # the second moment at step t weighs its past by 1 - t^-0.8 (arXiv 1804.04235, section 7.2)
ADAFACTOR_CLIP = 1.0  # bound on the root mean square of an update (section 6)
ADAFACTOR_MIN_SIZE = 128  # both dimensions of a matrix have to be this long to be worth factoring
ADAFACTOR_EPS = 1e-30  # added to squared gradients


def make_optimizer(settings: Settings, parameters: Iterable[nn.Parameter]) -> Optimizer:
    """The optimiser over trained parameters, which are float32; its rate is what the schedule makes of 1."""
    if settings.name == "adafactor":
        return Adafactor(parameters, weight_decay=settings.weight_decay)
    return AdamW(
        parameters,
        lr=1.0,
        betas=(settings.b1, settings.b2),
        eps=settings.eps,
        weight_decay=settings.weight_decay,
        foreach=False,
        fused=False,
    )


def make_scheduler(settings: Settings, steps: int, first: int, optimizer: Optimizer) -> LambdaLR:
    """The learning rate of each step of a run that goes on after `first` steps."""
    rates = learning_rates(settings, steps)
    return LambdaLR(optimizer, lambda step: float(rates[min(first + step, steps - 1)]))


class Adafactor(Optimizer):
    """Adafactor as train-jax has it: a factored second moment, updates clipped to a root mean square of 1."""

    def __init__(self, parameters: Iterable[nn.Parameter], *, weight_decay: float) -> None:
        super().__init__(parameters, {"lr": 1.0, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                update = self._precondition(parameter.grad, self.state[parameter])
                rms = update.square().mean().sqrt() / ADAFACTOR_CLIP
                update = update / rms.clamp(min=1.0)
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.add_(update, alpha=-group["lr"])

    @staticmethod
    def _precondition(grad: torch.Tensor, state: dict[str, Any]) -> torch.Tensor:
        state["step"] = state.get("step", torch.zeros(())) + 1
        decay = 1 - float(state["step"]) ** -ADAFACTOR_DECAY
        square = grad.square() + ADAFACTOR_EPS

        def moment(name: str, value: torch.Tensor) -> torch.Tensor:
            past = state.get(name, torch.zeros_like(value))
            state[name] = past * decay + value * (1 - decay)
            return state[name]

        if grad.ndim < 2 or min(grad.shape[-2:]) < ADAFACTOR_MIN_SIZE:
            return grad * moment("square", square).rsqrt()
        rows = moment("rows", square.mean(-1))
        columns = moment("columns", square.mean(-2))
        rows = (rows / rows.mean(-1, keepdim=True)).rsqrt()
        return grad * rows[..., :, None] * columns.rsqrt()[..., None, :]
