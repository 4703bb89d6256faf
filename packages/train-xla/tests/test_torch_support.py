"""What is refused beside adapters of experts, and on a machine of several GPUs."""

from types import SimpleNamespace

import pytest
import torch

from portlab_spec.errors import UserError
from portlab_spec.recipe import Lora, Mesh, Optimizer, Recipe
from portlab_xla.devices.plain import PlainDevice
from portlab_xla.support import require_supported_adapter

DENSE, EXPERTS = SimpleNamespace(experts=()), SimpleNamespace(experts=(4,))


@pytest.mark.parametrize(
    ("recipe", "named"),
    [
        (Recipe(lora=Lora(dropout=0.05)), "lora.dropout 0.05"),
        (Recipe(optimizer=Optimizer(name="adafactor")), "optimizer.name adafactor"),
    ],
)
def test_what_peft_cannot_do_with_experts_is_named(recipe, named):
    require_supported_adapter(recipe, [DENSE])
    with pytest.raises(UserError, match=named):
        require_supported_adapter(recipe, [DENSE, EXPERTS])


def test_plain_adapters_of_experts_are_trained():
    require_supported_adapter(Recipe(), [EXPERTS])


def test_several_gpus_are_refused_with_how_to_choose_one(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(UserError, match="CUDA_VISIBLE_DEVICES=0"):
        PlainDevice("cuda", Mesh())
