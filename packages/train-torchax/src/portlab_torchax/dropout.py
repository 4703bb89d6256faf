"""LoRA's dropout by a key that is an argument.

torchax 0.0.13 keeps the state of its random numbers outside of what JAX traces, and a compiled step that draws from it
leaks a tracer. Here each layer's key is a buffer, and a step puts another one in its place.
"""

import jax
import torch
from peft import PeftModel
from peft.tuners.lora.layer import LoraLayer
from torch import nn
from torchax import interop

ADAPTER = "default"
KEY = "key"


class KeyedDropout(nn.Module):
    """Dropout of its input in training, drawn from its buffer `key`, uint32 (2,)."""

    key: torch.Tensor

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate
        self.register_buffer(KEY, torch.zeros(2, dtype=torch.uint32), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training:
            return x
        found: torch.Tensor = interop.call_jax(_dropped, x, self.key, self.rate)
        return found


def _dropped(x: jax.Array, key: jax.Array, rate: float) -> jax.Array:
    keep = jax.random.bernoulli(jax.random.wrap_key_data(key), 1 - rate, x.shape)
    return jax.numpy.where(keep, x / (1 - rate), 0)


def use_keys(model: PeftModel) -> None:
    """Give every adapted layer of a model with dropout such a one."""
    for module in list(model.modules()):
        if isinstance(module, LoraLayer) and isinstance(found := dict(module.lora_dropout).get(ADAPTER), nn.Dropout):
            module.lora_dropout[ADAPTER] = KeyedDropout(found.p)


def key_names(model: nn.Module) -> list[str]:
    """Names of the buffers that hold keys."""
    return [f"{name}.{KEY}" for name, module in model.named_modules() if isinstance(module, KeyedDropout)]
