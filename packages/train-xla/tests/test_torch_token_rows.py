"""Trained rows of the tied embedding: PEFT's values and gradients, without its copies of the embedding."""

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model
from toy_gemmas import CASES, VOCAB, randomize

from portlab_hf.token_rows import use_rows_alone

IDS = [3, 7, VOCAB - 1]


@pytest.fixture(params=["gemma3, two kv heads", "gemma4, shared keys and values"])
def models(request):
    """A model as PEFT has it, and the same one computed from the rows alone."""
    torch.manual_seed(0)
    base = randomize(CASES[request.param]())
    config = LoraConfig(r=2, target_modules=["q_proj"], trainable_token_indices={"embed_tokens": IDS})
    stock = get_peft_model(base, config)
    for name, parameter in stock.named_parameters():
        if "trainable_tokens_delta" in name:
            torch.nn.init.normal_(parameter)
    ours = copy.deepcopy(stock)
    use_rows_alone(ours)
    return stock, ours


def loss_and_gradients(model):
    tokens = torch.tensor([[2, 3, 5, 7, 7, VOCAB - 1, 9, 3]])
    logits = model(input_ids=tokens, use_cache=False).logits
    loss = torch.nn.functional.cross_entropy(logits[0, :-1], tokens[0, 1:])
    loss.backward()
    return logits, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def test_logits_and_gradients_are_peft_s(models):
    (expected, gradients), (logits, ours) = map(loss_and_gradients, models)
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
    assert ours.keys() == gradients.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(ours[name], gradient, rtol=1e-4, atol=1e-6, msg=name)
    assert any("trainable_tokens_delta" in name and gradient.abs().max() > 0 for name, gradient in ours.items())


def test_no_copy_of_the_embedding_is_made(models):
    _, ours = models
    made = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            output = function(*args, **(kwargs or {}))
            if isinstance(output, torch.Tensor) and output.shape == (VOCAB, 32) and not function.is_view:
                made.append(str(function))
            return output

    with Watch():
        loss_and_gradients(ours)
    assert made == []
