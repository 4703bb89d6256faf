"""A packed step means what transformers means by its rows, one by one: the same loss, the same gradients."""

import numpy as np
import pytest
import torch
from toy_gemmas import CASES

from portlab_hf.experts import use_dense_experts
from portlab_hf.model import trained_parameters
from portlab_xla.loss import Sums, batch_sums

TOLERANCE = 2e-5  # of the largest entry of a gradient; the loss is held to a tenth of it


@pytest.fixture(scope="module")
def row_by_row():
    """Loss and gradients of transformers' own forward over each row, right-padded to one length."""

    def compute(toy, rows, *, z_loss=0.0):
        length, total = max(len(row.ids) for row in rows) + 3, sum(sum(row.loss) for row in rows)
        loss = torch.zeros(())
        for row in rows:
            n = len(row.ids)
            ids, labels = torch.zeros(1, length, dtype=torch.long), torch.full((1, length), -100)
            ids[0, :n] = torch.tensor(row.ids)
            held = torch.nn.functional.pad(torch.tensor(row.loss), (0, length - n))
            labels[0, held] = ids[0, held]
            seen = (torch.arange(length) < n).long()[None]
            out = toy.adapted(input_ids=ids, attention_mask=seen, labels=labels, use_cache=False)
            loss = loss + out.loss * sum(row.loss) / total
            if z_loss:
                partition = torch.logsumexp(out.logits[0, :-1].float(), -1)
                loss = loss + z_loss * partition[held[1:]].square().sum() / total
        return loss.item(), gradients(toy, loss)

    return compute


def gradients(toy, loss):
    parameters = trained_parameters(toy.adapted)
    return dict(zip(parameters, torch.autograd.grad(loss, parameters.values()), strict=True))


def packed_loss(toy, micro_batches, chunk, device, *, z_loss=0.0):
    sums = [
        Sums(*(value / batch.total for value in found))
        for batch in micro_batches
        for found in [batch_sums(toy.base, toy.config, batch, device.checkpoint, chunk=chunk, z_loss=z_loss)]
    ]
    return Sums(*(sum(values) for values in zip(*sums, strict=True)))


def assert_equal(found, expected):
    (loss, grads), (expected_loss, expected_grads) = found, expected
    assert loss == pytest.approx(expected_loss, rel=TOLERANCE / 10)
    assert grads.keys() == expected_grads.keys()
    for name, grad in grads.items():
        scale = float(expected_grads[name].abs().max())
        assert scale > 0, name
        np.testing.assert_allclose(grad, expected_grads[name], rtol=0, atol=TOLERANCE * scale, err_msg=name)


@pytest.mark.parametrize("share_prefix", [True, False], ids=["tree", "rows"])
@pytest.mark.parametrize("case", CASES)
def test_a_packed_batch_is_its_rows(case, share_prefix, adapted_toy, make_rows, packed, row_by_row, cpu):
    toy, rows = adapted_toy(case), make_rows()
    batches, chunk = packed(rows, toy.config, share_prefix=share_prefix)
    loss = packed_loss(toy, batches, chunk, cpu).loss
    assert_equal((loss.item(), gradients(toy, loss)), row_by_row(toy, rows))


@pytest.mark.parametrize(
    "how",
    [{"max_chunk": 8}, {"accumulate": 2}, {"groups": 2}, {"max_row_length": 64}],
    ids=["chunks of 8", "2 micro-batches", "2 groups", "short packed rows"],
)
def test_however_it_is_cut(how, adapted_toy, make_rows, packed, row_by_row, cpu):
    toy, rows = adapted_toy("gemma4, keys are values"), make_rows(6)
    loss = packed_loss(toy, *packed(rows, toy.config, **how), cpu).loss
    assert_equal((loss.item(), gradients(toy, loss)), row_by_row(toy, rows))


def test_z_loss_is_added_to_what_is_differentiated_alone(adapted_toy, make_rows, packed, row_by_row, cpu):
    toy, rows = adapted_toy("gemma4, no pattern"), make_rows()
    batches, chunk = packed(rows, toy.config, max_chunk=8)
    plain, with_z = (packed_loss(toy, batches, chunk, cpu, z_loss=z) for z in (0.0, 0.1))
    assert_equal((with_z.loss.item(), gradients(toy, with_z.loss)), row_by_row(toy, rows, z_loss=0.1))
    assert with_z.nll.item() == plain.nll.item() == plain.loss.item()


def test_logits_are_bounded_by_the_softcap(adapted_toy, make_rows, packed, row_by_row, cpu):
    toy, rows = adapted_toy("gemma4, keys are values"), make_rows()
    toy.base.config.final_logit_softcapping = 0.5
    batches, chunk = packed(rows, toy.config)
    loss = packed_loss(toy, batches, chunk, cpu).loss
    assert_equal((loss.item(), gradients(toy, loss)), row_by_row(toy, rows))


def test_correct_counts_supervised_tokens_that_are_the_first_choice(adapted_toy, make_rows, packed, cpu):
    toy, rows = adapted_toy("gemma3, two kv heads"), make_rows()
    batches, chunk = packed(rows, toy.config)
    with torch.no_grad():
        sums = batch_sums(toy.base, toy.config, batches[0], cpu.checkpoint, chunk=chunk)
        hits = 0
        for row in rows:
            choice = toy.adapted(input_ids=torch.tensor([row.ids])).logits[0].argmax(-1)
            hits += sum(int(choice[i - 1]) == row.ids[i] for i, held in enumerate(row.loss) if held)
    assert sums.correct.item() == hits


def test_trained_rows_count_as_inputs_and_as_outputs(adapted_toy, make_rows, packed, row_by_row, cpu):
    """The head is tied: a trained row is looked up, and it is also a row of the logits' matrix."""
    toy = adapted_toy("gemma3, two kv heads", targets=("o_proj",))
    name = next(name for name in trained_parameters(toy.adapted) if "trainable_tokens" in name)
    seen = make_rows()
    unseen = make_rows(trained=())
    for rows in (seen, unseen):
        loss = packed_loss(toy, *packed(rows, toy.config), cpu).loss
        assert_equal((loss.item(), gradients(toy, loss)), row_by_row(toy, rows))
        assert float(gradients(toy, packed_loss(toy, *packed(rows, toy.config), cpu).loss)[name].abs().max()) > 0


@pytest.mark.parametrize("dense", [False, True], ids=["by transformers", "all of them for every token"])
def test_experts_may_be_adapted(dense, adapted_toy, make_rows, packed, row_by_row, cpu):
    targets = ("experts.gate_up_proj", "experts.down_proj", "q_proj")
    toy, rows = adapted_toy("gemma4, experts", targets=targets), make_rows()
    expected = row_by_row(toy, rows)
    if dense:
        use_dense_experts(toy.base)
    loss = packed_loss(toy, *packed(rows, toy.config), cpu).loss
    assert_equal((loss.item(), gradients(toy, loss)), expected)
