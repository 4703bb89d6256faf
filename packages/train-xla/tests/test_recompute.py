"""What is computed again in the backward pass changes neither losses nor gradients."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint
from toy_gemmas import CASES

from portlab_hf.model import decoder_layers, trained_parameters
from portlab_hf.recompute import recompute_layers
from portlab_xla.loss import batch_sums


def by_position(function, *args, **_):
    """As torch_xla's checkpoint: reentrant, so that gradients flow through positional tensors alone."""
    return checkpoint(function, *args, use_reentrant=True)


def without_reentering(function, *args, **_):
    return checkpoint(function, *args, use_reentrant=False)


CHECKPOINTS = {"reentrant": by_position, "not reentrant": without_reentering}


def loss_and_gradients(toy, batch, chunk, how):
    for parameter in toy.adapted.parameters():
        parameter.grad = None
    loss = batch_sums(toy.base, toy.config, batch, how, chunk=chunk).loss / batch.total
    loss.backward()
    return loss.item(), {name: parameter.grad for name, parameter in trained_parameters(toy.adapted).items()}


@pytest.fixture(params=CHECKPOINTS)
def how(request):
    return CHECKPOINTS[request.param]


@pytest.mark.parametrize("case", CASES)
def test_the_same_gradients(case, how, adapted_toy, make_rows, packed, cpu):
    toy = adapted_toy(case)
    (batch,), chunk = packed(make_rows(), toy.config)
    loss, grads = loss_and_gradients(toy, batch, chunk, cpu.checkpoint)
    recompute_layers(toy.base, how)
    again, grads_again = loss_and_gradients(toy, batch, chunk, how)
    assert again == loss
    for name, grad in grads.items():
        assert grads_again[name] is not None, name
        torch.testing.assert_close(grads_again[name], grad, rtol=1e-5, atol=1e-6 * float(grad.abs().max()), msg=name)


@pytest.mark.parametrize("target", ["k_proj", "v_proj"])
def test_adapters_of_shared_keys_and_values_learn_from_the_layers_that_read_them(
    target, how, adapted_toy, make_rows, packed, cpu
):
    """A layer before the shared ones gets two gradients: one through its own attention, one through theirs."""
    toy = adapted_toy("gemma4, shared keys and values", targets=(target,), token_ids=())
    (batch,), chunk = packed(make_rows(), toy.config)
    _, expected = loss_and_gradients(toy, batch, chunk, cpu.checkpoint)
    with_own_alone = detached_readers(toy, batch, chunk, cpu)
    recompute_layers(toy.base, how)
    _, grads = loss_and_gradients(toy, batch, chunk, how)
    source = [name for name in grads if ".layers.2." in name]
    assert source
    for name in source:
        torch.testing.assert_close(grads[name], expected[name], rtol=1e-5, atol=1e-6)
        assert (grads[name] - with_own_alone[name]).norm() > 1e-2 * grads[name].norm()


def detached_readers(toy, batch, chunk, device):
    """Gradients if the layers that share keys and values passed nothing back to where these come from."""

    def detach(layer, args, kwargs):
        shared = kwargs["shared_kv_states"]
        read = type(shared)({name: tuple(x.detach() for x in states) for name, states in shared.items()})
        return args, kwargs | {"shared_kv_states": read}

    readers = decoder_layers(toy.base)[-3:]
    handles = [layer.register_forward_pre_hook(detach, with_kwargs=True) for layer in readers]
    _, grads = loss_and_gradients(toy, batch, chunk, device.checkpoint)
    for handle in handles:
        handle.remove()
    return grads


def test_layers_are_computed_twice(how, adapted_toy, make_rows, packed, cpu):
    toy = adapted_toy("gemma3, two kv heads")
    (batch,), chunk = packed(make_rows(), toy.config)
    calls = []
    for layer in decoder_layers(toy.base):
        layer.mlp.register_forward_hook(lambda *_: calls.append(1))
    recompute_layers(toy.base, how)
    loss_and_gradients(toy, batch, chunk, how)
    assert len(calls) == 2 * len(decoder_layers(toy.base))


def test_dropout_draws_again_what_it_drew(how, adapted_toy, make_rows, packed, cpu):
    toy = adapted_toy("gemma3, two kv heads", dropout=0.3)
    (batch,), chunk = packed(make_rows(), toy.config)
    cpu.seed(7)
    loss, grads = loss_and_gradients(toy, batch, chunk, cpu.checkpoint)
    recompute_layers(toy.base, how)
    cpu.seed(7)
    again, grads_again = loss_and_gradients(toy, batch, chunk, how)
    cpu.seed(8)
    other, _ = loss_and_gradients(toy, batch, chunk, how)
    assert again == loss
    assert other != loss
    for name, grad in grads.items():
        torch.testing.assert_close(grads_again[name], grad, rtol=1e-5, atol=1e-6)
