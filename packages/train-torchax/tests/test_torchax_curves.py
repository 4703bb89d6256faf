"""20 steps are those of a loop that anybody would write with transformers, PEFT and PyTorch's AdamW."""

import dataclasses

import numpy as np
import pytest
import torch

from portlab_spec.packing import Batch, BatchOrder, Rows, pack_batch
from portlab_spec.schedule import learning_rates

STEPS = 20
TOLERANCE = 1e-4
COSINE = {"schedule": "cosine", "warmup_steps": 3, "weight_decay": 0.1, "b2": 0.95, "clip_norm": 1.0}
LORA = {"optimizer": COSINE | {"learning_rate": 1e-2}}
FULL = {"method": "full", "optimizer": COSINE | {"learning_rate": 3e-3}}
RUNS = {
    "gemma3": ("gemma3, two kv heads", LORA),
    "gemma4, keys are values": ("gemma4, keys are values", LORA),
    "gemma4, shared keys and values": ("gemma4, shared keys and values", LORA),
    "gemma4, experts": ("gemma4, experts", LORA),
    "llama": ("llama", LORA),
    "mistral": ("mistral", LORA),
    "qwen2": ("qwen2", LORA),
    "qwen3": ("qwen3", LORA),
    "gemma3, all weights": ("gemma3, two kv heads", FULL),
    "llama, all weights": ("llama", FULL),
}


# A window, layers that are read from dictionaries, heads of their own, all weights.
PADDED = ["gemma3", "gemma4, shared keys and values", "mistral", "llama, all weights"]


@pytest.fixture(scope="module")
def run(toy, make_rows, in_plain_pytorch):
    """A setup, the rows of its steps, and the curve of the plain loop, made once."""
    made = {}

    def get(name):
        if name not in made:
            case, changes = RUNS[name]
            setup = toy(case, **changes)
            order = BatchOrder(make_rows(12), setup.recipe.batch_size, STEPS, seed=0)
            made[name] = setup, order, plain_curve(in_plain_pytorch(setup), setup.recipe, order)
        return made[name]

    return get


def plain_curve(model, recipe, order):
    trained = [p for p in model.parameters() if p.requires_grad]
    if recipe.method == "lora":
        groups = [{"params": trained}]
    else:
        groups = [{"params": [p for p in trained if p.ndim > 1]}]
        groups += [{"params": [p for p in trained if p.ndim == 1], "weight_decay": 0.0}]
    settings = recipe.optimizer
    adamw = torch.optim.AdamW(
        groups, betas=(settings.b1, settings.b2), eps=settings.eps, weight_decay=settings.weight_decay
    )
    found = []
    for number, rate in enumerate(learning_rates(settings, STEPS)):
        loss = model(**right_padded(order[number]), use_cache=False).loss
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(trained, settings.clip_norm)
        for group in adamw.param_groups:
            group["lr"] = float(rate)
        adamw.step()
        adamw.zero_grad()
        found.append((loss.item(), norm.item()))
    return np.array(found).T


def right_padded(rows):
    length = max(len(row.ids) for row in rows) + 3
    ids = torch.zeros(len(rows), length, dtype=torch.long)
    seen, labels = torch.zeros_like(ids), torch.full_like(ids, -100)
    for i, row in enumerate(rows):
        n = len(row.ids)
        ids[i, :n], seen[i, :n] = torch.tensor(row.ids), 1
        labels[i, :n] = torch.tensor(row.ids).where(torch.tensor(row.loss), -100)
    return {"input_ids": ids, "attention_mask": seen, "labels": labels}


def packed(setup, order):
    """Trees of what rows share, several of them in a packed row."""
    plan = setup.plan(order)
    assert plan.held_tokens < plan.row_tokens
    return [(plan.layout(i), pack_batch(rows, plan.layout(i))) for i, rows in enumerate(order)]


def padded(setup, order):
    """Every row by itself: its end, its start or its middle is padding longer than the window; one row is nothing
    else."""
    layout = dataclasses.replace(setup.plan(order).layouts[0], chunk=8)
    return [(layout, padded_batch(rows)) for rows in order]


def padded_batch(rows, length=64, slots=40):
    arrays = Rows(*(np.zeros((1, 1, len(rows) + 1, length), np.int32) for _ in Rows._fields))
    where, targets = [], []
    for r, row in enumerate(rows):
        n = len(row.ids)
        start = (0, length - n, (length - n) // 2)[r % 3]
        arrays.tokens[0, 0, r, start : start + n] = row.ids
        arrays.positions[0, 0, r, start : start + n] = np.arange(n)
        arrays.ends[0, 0, r, start : start + n] = start + n
        held = np.flatnonzero(row.loss)
        where += (r * length + start + held - 1).tolist()
        targets += np.array(row.ids)[held].tolist()

    def filled(values, dtype):
        return np.pad(np.array(values, dtype), (0, slots - len(values)))[None, None]

    return Batch(arrays, (), filled(where, np.int32), filled(targets, np.int32), filled([1] * len(where), np.float32))


def assert_one_curve(found, expected):
    assert found.shape == (2, STEPS)
    np.testing.assert_allclose(found, expected, rtol=TOLERANCE)
    assert found[0, -3:].mean() < 0.95 * found[0, :3].mean()  # or a step that does nothing would pass


@pytest.mark.parametrize("name", RUNS)
def test_packed_trees(name, run, curve):
    setup, order, expected = run(name)
    assert_one_curve(curve(setup, packed(setup, order)), expected)


@pytest.mark.parametrize("name", PADDED)
def test_padding_on_either_side(name, run, curve):
    setup, order, expected = run(name)
    assert_one_curve(curve(setup, padded(setup, order)), expected)
