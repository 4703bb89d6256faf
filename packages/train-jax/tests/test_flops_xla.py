"""The FLOPs formula against XLA's own count."""

import jax
import jax.numpy as jnp
import pytest

from portlab_spec.models.flops import ModelSize, StepSize, attention_size, step_flops

TOKENS, IN, OUT, RANK, VOCAB, SLOTS = 64, 96, 128, 8, 512, 16


def layer_loss(weight, x, a, b, head):
    y = x @ weight + x @ a @ b
    return jnp.sum((y[:SLOTS] @ head) ** 2)


@pytest.mark.parametrize(("method", "gradients_of"), [("lora", (1, 2, 3)), ("full", (0, 1, 4))])
def test_a_layer_and_the_head_as_xla_counts_them(method, gradients_of):
    """The gradients of what is trained and of the layer's input, which the layers below need."""
    a, b = ((IN, RANK), (RANK, OUT)) if method == "lora" else ((IN, 0), (0, OUT))
    shapes = [(IN, OUT), (TOKENS, IN), a, b, (OUT, VOCAB)]
    arguments = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    counted = jax.jit(jax.grad(layer_loss, gradients_of)).lower(*arguments).compile().cost_analysis()["flops"]
    model = ModelSize(linears=IN * OUT, adapters=RANK * (IN + OUT), head=OUT * VOCAB)
    assert step_flops(model, StepSize(TOKENS, 0, SLOTS), method=method) == pytest.approx(counted, rel=0.03)


def attention(q, k, v):
    return jnp.sum(jax.nn.softmax(q @ k.T) @ v * v)


def test_attention_as_xla_counts_it():
    arguments = [jax.ShapeDtypeStruct((256, 64), jnp.float32)] * 3
    counted = jax.jit(jax.grad(attention, argnums=(0, 1, 2))).lower(*arguments).compile().cost_analysis()["flops"]
    # XLA computes the masked half too, and softmax: 256 x 256 x about 10 beside 256 x 256 x 64 x 12.
    assert 12 * attention_size([(256 * 256, 1, 64)]) == pytest.approx(counted, rel=0.03)
