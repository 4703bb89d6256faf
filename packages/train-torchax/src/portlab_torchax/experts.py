"""PEFT's adapters of bare parameters, which experts are, without PyTorch's parametrizations.

PEFT registers one for every forward and takes it away behind it, by operations that torchax lacks. Here a layer is
called with the sum of weight and product as the value of its parameter, as a whole model is with all of its tensors.
"""

from functools import partial
from typing import Any

import torch
from peft import PeftModel
from peft.tuners.lora.layer import ParamWrapper

ADAPTER = "default"
BASE = "base_layer"


def use_sums(model: PeftModel) -> None:
    """Have every adapted bare parameter of a model computed so."""
    for module in list(model.modules()):
        if isinstance(module, ParamWrapper):
            module.forward = partial(_forward, module)  # type: ignore[method-assign]


def _forward(wrapper: ParamWrapper, *args: Any, **kwargs: Any) -> Any:
    # Wrappers of two parameters of one layer stand around each other.
    name, inner = wrapper.parameter_name, wrapper.base_layer
    while isinstance(inner, ParamWrapper):
        name, inner = f"{BASE}.{name}", inner.base_layer
    weight = wrapper.get_param() + wrapper.get_delta_weight(ADAPTER)
    return torch.func.functional_call(wrapper.base_layer, {name: weight}, args, kwargs)
