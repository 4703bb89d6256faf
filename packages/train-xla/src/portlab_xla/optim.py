"""The recipe's optimiser and learning rate, in PyTorch.

Both are train-jax's: decoupled weight decay, a schedule whose first step is above zero, and an Adafactor without a
first moment and without steps relative to the weights. PyTorch's fused kernels do not exist on XLA, and none is used.

On XLA a Python number in a step is part of its graph as far as it equals another: AdamW's bias correction is 0.1 in the
first step with b2 0.99, as 1 - b1 is, and in no other step, which made for two graphs of minutes each. So what changes
from step to step are tensors here, and state exists before the first step.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from portlab_spec.recipe import Optimizer as Settings
from portlab_spec.schedule import learning_rates

ADAFACTOR_DECAY = 0.8  # the second moment at step t weighs its past by 1 - t^-0.8 (arXiv 1804.04235, section 7.2)
ADAFACTOR_CLIP = 1.0  # bound on the root mean square of an update (section 6)
ADAFACTOR_MIN_SIZE = 128  # both dimensions of a matrix have to be this long to be worth factoring
ADAFACTOR_EPS = 1e-30  # added to squared gradients

Zeros = Callable[[torch.Tensor], torch.Tensor]


def make_optimizer(
    settings: Settings, parameters: Iterable[nn.Parameter], zeros_like: Zeros = torch.zeros_like
) -> Optimizer:
    """The optimiser over trained parameters, which are float32; its rate is what the schedule makes of 1.

    Args:
        settings: the recipe's section.
        parameters: placed on their device.
        zeros_like: zeros in the shape and place of a parameter; of the device.
    """
    kind = Adafactor if settings.name == "adafactor" else AdamW
    return kind(parameters, settings, zeros_like)


def make_scheduler(settings: Settings, steps: int, first: int, optimizer: Optimizer) -> LambdaLR:
    """The learning rate of each step of a run that goes on after `first` steps."""
    rates = learning_rates(settings, steps)
    return LambdaLR(optimizer, lambda step: float(rates[min(first + step, steps - 1)]))


class StaticOptimizer(Optimizer):
    """An optimiser whose step is one graph: `update` gets everything that changes as tensors on the device."""

    def __init__(self, parameters: Iterable[nn.Parameter], settings: Settings, zeros_like: Zeros) -> None:
        self.settings = settings
        # The count is no tensor: accelerate would move it to the device, and every step would wait to read it.
        super().__init__(parameters, {"lr": 1.0, "weight_decay": settings.weight_decay, "steps": 0})
        for parameter in (parameter for group in self.param_groups for parameter in group["params"]):
            self.state[parameter] = self.begin(parameter, zeros_like)

    def begin(self, parameter: nn.Parameter, zeros_like: Zeros) -> dict[str, torch.Tensor]:
        """Moments of a parameter before the first step."""
        raise NotImplementedError

    def numbers(self, step: int) -> list[float]:
        """What changes from step to step besides the rate; counted from 1."""
        raise NotImplementedError

    def update(self, grad: torch.Tensor, state: dict[str, Any], numbers: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """Advance the moments; what to subtract from the parameter for a rate of 1."""
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            trained = [parameter for parameter in group["params"] if parameter.grad is not None]
            if not trained:
                continue
            group["steps"] += 1
            values = [group["lr"], *self.numbers(group["steps"])]
            rate, *numbers = torch.tensor(values, dtype=torch.float32).to(trained[0].device).unbind()
            for parameter in trained:
                update = self.update(parameter.grad, self.state[parameter], tuple(numbers))
                if group["weight_decay"]:
                    update = update + group["weight_decay"] * parameter
                parameter.sub_(rate * update)


class AdamW(StaticOptimizer):
    """AdamW (arXiv 1711.05101), equal to PyTorch's."""

    def begin(self, parameter: nn.Parameter, zeros_like: Zeros) -> dict[str, torch.Tensor]:
        return {name: zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}

    def numbers(self, step: int) -> list[float]:
        return [1 - self.settings.b1**step, 1 - self.settings.b2**step]

    def update(self, grad: torch.Tensor, state: dict[str, Any], numbers: tuple[torch.Tensor, ...]) -> torch.Tensor:
        correct_mean, correct_square = numbers
        state["exp_avg"].lerp_(grad, 1 - self.settings.b1)
        state["exp_avg_sq"].lerp_(grad.square(), 1 - self.settings.b2)
        return (state["exp_avg"] / correct_mean) / ((state["exp_avg_sq"] / correct_square).sqrt() + self.settings.eps)


class Adafactor(StaticOptimizer):
    """Adafactor as train-jax has it: a factored second moment, updates clipped to a root mean square of 1."""

    def begin(self, parameter: nn.Parameter, zeros_like: Zeros) -> dict[str, torch.Tensor]:
        if not _factored(parameter):
            return {"square": zeros_like(parameter)}
        zeros = torch.zeros(parameter.shape)
        return {"rows": zeros.mean(-1).to(parameter.device), "columns": zeros.mean(-2).to(parameter.device)}

    def numbers(self, step: int) -> list[float]:
        return [1 - step**-ADAFACTOR_DECAY]

    def update(self, grad: torch.Tensor, state: dict[str, Any], numbers: tuple[torch.Tensor, ...]) -> torch.Tensor:
        (decay,) = numbers
        square = grad.square() + ADAFACTOR_EPS
        seen = {"square": square}
        if _factored(grad):
            seen = {"rows": square.mean(-1), "columns": square.mean(-2)}
        for name, value in seen.items():
            state[name].mul_(decay).add_(value * (1 - decay))
        if _factored(grad):
            rows = (state["rows"] / state["rows"].mean(-1, keepdim=True)).rsqrt()
            update = grad * rows[..., :, None] * state["columns"].rsqrt()[..., None, :]
        else:
            update = grad * state["square"].rsqrt()
        rms = update.square().mean().sqrt() / ADAFACTOR_CLIP
        return update / rms.clamp(min=1.0)


def _factored(matrix: torch.Tensor) -> bool:
    return matrix.ndim >= 2 and min(matrix.shape[-2:]) >= ADAFACTOR_MIN_SIZE
