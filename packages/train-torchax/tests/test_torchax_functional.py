"""A model as a function of its tensors, and torchax on exactly while it is called."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torchax
from torch import nn
from torch.overrides import _get_current_function_mode_stack as function_modes
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack as dispatch_modes

from portlab_torchax.functional import Functional, enabled, plain_torch


def switch():
    """torchax's own word for it, and what of it PyTorch really calls."""
    return torchax.default_env().enabled, len(function_modes()), len(dispatch_modes())


OFF, ON = (False, 0, 0), (True, 1, 1)


@pytest.fixture(params=[OFF, ON], ids=["torchax off", "torchax enabled globally"])
def before(request):
    if request.param == ON:
        torchax.enable_globally()
    yield request.param
    while function_modes():
        torchax.disable_globally()


@pytest.mark.parametrize(("context", "depths"), [(enabled, {OFF: 1, ON: 2}), (plain_torch, {OFF: 0, ON: 0})])
def test_switches_and_switches_back(context, depths, before):
    with context():
        assert len(function_modes()) == len(dispatch_modes()) == depths[before]
        assert torchax.default_env().enabled == (context is enabled)
    assert switch() == before


@pytest.mark.parametrize("context", [enabled, plain_torch])
def test_switches_back_after_an_exception(context, before):
    with pytest.raises(ZeroDivisionError), context():
        _ = 1 / 0
    assert switch() == before


@pytest.mark.parametrize("outer", [enabled, plain_torch])
@pytest.mark.parametrize("inner", [enabled, plain_torch])
def test_switches_back_from_within_each_other(outer, inner, before):
    with outer():
        within = switch()
        with pytest.raises(ZeroDivisionError), inner():
            _ = 1 / 0
        assert switch() == within
    assert switch() == before


def test_plain_torch_computes_with_pytorch_s_tensors(before):
    with plain_torch():
        assert type(torch.ones(2) + 1) is torch.Tensor


class Tied(nn.Module):
    """An embedding whose matrix is also the head's, a layer, and a buffer."""

    def __init__(self):
        super().__init__()
        self.embed, self.layer, self.head = nn.Embedding(5, 4), nn.Linear(4, 4), nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.tensor(3.0))

    def forward(self, tokens):
        return self.head(self.layer(self.embed(tokens) * self.scale))


@pytest.fixture
def tied():
    torch.manual_seed(0)
    functional = Functional(Tied())
    values = {name: jnp.asarray(tensor.detach().numpy()) for name, tensor in functional.tensors().items()}
    return functional, values


TOKENS = jnp.array([0, 3, 4])


def forward(model, tokens):
    return model(tokens)


def test_computes_what_the_module_computes(tied):
    functional, values = tied
    expected = functional.module(torch.tensor(np.array(TOKENS))).detach()
    np.testing.assert_allclose(functional(values, forward, TOKENS), expected, rtol=1e-6)
    np.testing.assert_allclose(jax.jit(lambda v: functional(v, forward, TOKENS))(values), expected, rtol=1e-5)


def test_a_tied_weight_is_one_value_and_buffers_are_values(tied):
    functional, values = tied
    assert functional.names == ("embed.weight", "layer.weight", "layer.bias", "scale")

    def total(values):
        return functional(values, forward, TOKENS).sum()

    gradient = jax.grad(total)(values)
    module = functional.module
    module(torch.tensor(np.array(TOKENS))).sum().backward()
    np.testing.assert_allclose(gradient["embed.weight"], module.embed.weight.grad, rtol=1e-5, atol=1e-6)
    twice = values | {name: values[name] * 2 for name in ("scale", "layer.bias")}
    doubled = functional(twice, forward, TOKENS)
    np.testing.assert_allclose(doubled, 2 * functional(values, forward, TOKENS), rtol=1e-5)


def test_release_gives_the_memory_back_and_the_values_still_count(tied):
    functional, values = tied
    expected = functional(values, forward, TOKENS)
    functional.release()
    for name, tensor in functional.tensors().items():
        assert tensor.untyped_storage().nbytes() == tensor.element_size(), name
        assert tensor.shape == values[name].shape
    assert functional.names == tuple(functional.tensors())
    np.testing.assert_array_equal(functional(values, forward, TOKENS), expected)


class Shared(nn.Module):
    """One submodule by two names, as PEFT holds trained rows of a tied embedding."""

    def __init__(self):
        super().__init__()
        self.one = self.other = nn.Linear(2, 2, bias=False)

    def forward(self, x):
        return self.one(x) + self.other(x)


def test_a_submodule_by_two_names_gets_its_own_tensor_back():
    functional = Functional(Shared())
    own = functional.module.one.weight
    value = jnp.eye(2)
    np.testing.assert_array_equal(functional({"one.weight": value}, forward, jnp.ones(2)), [2, 2])
    assert functional.module.one.weight is functional.module.other.weight is own
    assert functional.names == ("one.weight",)


@pytest.mark.parametrize("training", [False, True])
def test_the_mode_is_set_for_the_call_alone(training, tied):
    functional, values = tied
    functional.module.train(not training)
    seen = []
    functional(values, lambda model, tokens: seen.append(model.layer.training), TOKENS, training=training)
    assert seen == [training]
    assert functional.module.training is not training


def test_a_function_that_fails_while_it_is_traced_leaves_everything_as_it_was(tied, before):
    functional, values = tied
    with plain_torch():
        own = {name: tensor.data_ptr() for name, tensor in functional.tensors().items()}
    functional.module.eval()

    def fail(model, tokens):
        raise ArithmeticError(model(tokens).shape)

    with pytest.raises(ArithmeticError):
        jax.jit(lambda values: functional(values, fail, TOKENS, training=True))(values)
    assert switch() == before
    assert not functional.module.training
    with plain_torch():
        assert {name: tensor.data_ptr() for name, tensor in functional.tensors().items()} == own
    np.testing.assert_allclose(
        functional(values, forward, TOKENS), jax.jit(lambda v: functional(v, forward, TOKENS))(values), rtol=1e-5
    )


def test_a_run_is_set_up_whether_or_not_torchax_is_enabled(before, toy):
    setup = toy("qwen3")
    assert all(isinstance(value, jax.Array) for value in (*setup.frozen.values(), *setup.start.values()))
    assert switch() == before


def test_type_as_gives_another_tensor():
    with enabled():
        x, like = torch.ones(2, 2, device="jax"), torch.ones(2, 2, device="jax", dtype=torch.bfloat16)
        assert x.type_as(like).dtype == x.type_as(like[0]).dtype == torch.bfloat16
        assert x.dtype == torch.float32
