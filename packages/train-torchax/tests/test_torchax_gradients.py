"""The gradient of every trained leaf is transformers' and PEFT's own, however a step is cut."""

import dataclasses

import numpy as np
import pytest
import torch

TOLERANCE = 2e-5  # of the largest entry of a gradient; the loss is held to a tenth of it


def row_by_row(model, rows, z_loss=0.0):
    """Loss and gradients of transformers' own forward over each row, right-padded."""
    total, loss = sum(sum(row.loss) for row in rows), torch.zeros(())
    for row in rows:
        ids = torch.tensor([[*row.ids, 0, 0, 0]])
        held = torch.tensor([[*row.loss, False, False, False]])
        seen = torch.ones_like(ids)
        seen[:, len(row.ids) :] = 0
        out = model(input_ids=ids, attention_mask=seen, labels=ids.where(held, -100), use_cache=False)
        loss = loss + out.loss * sum(row.loss) / total
        if z_loss:
            partition = torch.logsumexp(out.logits[0, :-1].float(), -1)
            loss = loss + z_loss * partition[held[0, 1:]].square().sum() / total
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    return loss.item(), dict(zip(trained, torch.autograd.grad(loss, trained.values()), strict=True))


def assert_equal(found, expected):
    (sums, total, grads), (expected_loss, expected_grads) = found, expected
    assert float(sums.loss / total) == pytest.approx(expected_loss, rel=TOLERANCE / 10)
    assert grads.keys() == expected_grads.keys()
    for name, grad in grads.items():
        scale = float(expected_grads[name].abs().max())
        assert scale > 0, name
        np.testing.assert_allclose(grad, expected_grads[name], rtol=0, atol=TOLERANCE * scale, err_msg=name)


@pytest.mark.parametrize("case", ["gemma3, scaled global rope", "gemma4, no pattern", "qwen2"])
def test_every_leaf_of_an_adapter(case, toy, make_rows, gradients, in_plain_pytorch):
    setup, rows = toy(case), make_rows()
    assert_equal(gradients(setup, rows), row_by_row(in_plain_pytorch(setup), rows))


@pytest.mark.parametrize("case", ["gemma3, two kv heads", "mistral"])
def test_every_weight(case, toy, make_rows, gradients, in_plain_pytorch):
    setup, rows = toy(case, method="full"), make_rows()
    assert_equal(gradients(setup, rows), row_by_row(in_plain_pytorch(setup), rows))


def test_adapters_of_experts(toy, make_rows, gradients, in_plain_pytorch):
    targets = ("experts.gate_up_proj", "experts.down_proj", "q_proj")
    setup, rows = toy("gemma4, experts", lora={"targets": targets}), make_rows()
    assert_equal(gradients(setup, rows), row_by_row(in_plain_pytorch(setup), rows))


@pytest.mark.parametrize(
    "how",
    [{"chunk": 8}, {"accumulate": 2}, {"share_prefix": False, "pack": False}],
    ids=["chunks of 8", "2 micro-batches", "a row for each example"],
)
def test_however_a_step_is_cut(how, toy, make_rows, gradients, in_plain_pytorch):
    setup, rows = toy("qwen3", **how), make_rows()
    assert_equal(gradients(setup, rows), row_by_row(in_plain_pytorch(setup), rows))


def test_z_loss_is_added_to_what_is_differentiated_alone(toy, make_rows, gradients, in_plain_pytorch):
    setup, rows = toy("qwen3", z_loss=0.1, chunk=8), make_rows()
    found = gradients(setup, rows)
    assert_equal(found, row_by_row(in_plain_pytorch(setup), rows, z_loss=0.1))
    plain, _ = row_by_row(in_plain_pytorch(setup), rows)
    assert float(found[0].nll / found[1]) == pytest.approx(plain, rel=TOLERANCE / 10)


@pytest.mark.parametrize("trained", [(3, 5), ()], ids=["seen as inputs and targets", "never seen"])
def test_trained_rows_of_the_embedding_are_peft_s(trained, toy, make_rows, gradients, in_plain_pytorch):
    """The head is tied, so that rows that no token looks up still get the gradient of their logits."""
    setup, rows = toy("qwen3", lora={"targets": ("o_proj",)}), make_rows(trained=trained)
    found = gradients(setup, rows)
    assert any("trainable_tokens" in name for name in found[2])
    assert_equal(found, row_by_row(in_plain_pytorch(setup), rows))


def test_correct_counts_supervised_tokens_that_are_the_first_choice(toy, make_rows, gradients, in_plain_pytorch):
    setup = toy("qwen3")
    model, rows, hits = in_plain_pytorch(setup), [], 0
    for row in make_rows():
        with torch.no_grad():
            choice = model(input_ids=torch.tensor([row.ids])).logits[0].argmax(-1).tolist()
        rows.append(dataclasses.replace(row, ids=(*row.ids[:-1], choice[-2])))  # one hit at least
        hits += sum(choice[i - 1] == rows[-1].ids[i] for i, held in enumerate(row.loss) if held)
    assert float(gradients(setup, rows)[0].correct) == hits >= len(rows)
