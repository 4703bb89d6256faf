"""Examples per second of one training step: ours, its own plain variants, and transformers + PEFT.

    nox -s bench_step                     all contenders, writes bench/results/bench_step.json
    nox -s bench_step -- --rows 16        another batch size

All contenders take the same rows of fitness-213, the same adapter values, float32, and must report the same loss.
Each runs in a process of its own, so that peak memory is its own; the first contender runs again at the end, so that
a machine that slowed down meanwhile shows. What cannot hold the whole batch in memory accumulates gradients over
micro-batches of 4 rows.

    packed            what train-jax runs: shared prefix once, packed suffixes, logits at supervised positions
    packed, all logits        the same with logits at every suffix position
    padded, gathered logits   one row per example padded to the longest, logits at supervised positions
    padded, all logits        one row per example padded to the longest, logits at every position
    peft              transformers + PEFT, padded to the longest row as TRL's collator pads, eager loop
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from portlab_spec.assets import default_model
from portlab_spec.data import load_dataset
from portlab_spec.data.tokens import Row, tokenize
from portlab_spec.formats import FORMATS
from portlab_spec.models import GemmaConfig, match_targets, param_table
from portlab_spec.recipe import load_recipe
from portlab_spec.report import peak_rss_bytes
from portlab_spec.tokenizer import Tokenizer
from result_file import write_result

if TYPE_CHECKING:
    from portlab_jax.packing import Layout

MICRO_BATCH = 4
RECIPE = load_recipe("functiongemma-fitness")
CONTENDERS = ("packed", "packed, all logits", "padded, gathered logits", "padded, all logits", "peft")


def load_rows(count: int) -> list[Row]:
    """The first `count` training rows, taken evenly over the tools."""
    model = default_model()
    train = [c for c in load_dataset("fitness-213") if c.split == "train"]
    rows = tokenize(train, FORMATS["functiongemma"], Tokenizer.load(model.path), 1024)
    by_tool: dict[str, list[Row]] = {}
    for row in rows:
        by_tool.setdefault(row.stratum, []).append(row)
    turns = zip(*by_tool.values(), strict=False)
    return [row for turn in turns for row in turn][:count]


def adapter_values(config: GemmaConfig) -> dict[str, dict[str, np.ndarray]]:
    """One random adapter for all contenders, b not zero so that every gradient flows."""
    rng = np.random.default_rng(0)
    layers, rank = config.num_hidden_layers, RECIPE.lora.rank
    return {
        p.name: {
            "a": rng.uniform(-1, 1, (layers, p.shape[1], rank)).astype(np.float32) / np.sqrt(p.shape[1]),
            "b": rng.normal(0, 0.002, (layers, rank, p.shape[0])).astype(np.float32),
        }
        for p in match_targets(param_table(config), RECIPE.lora.targets)
    }


def timed(step: Callable[[], float], repeats: int) -> dict[str, object]:
    """Run a step once to warm up and then `repeats` times."""
    started = time.perf_counter()
    loss = step()
    first = time.perf_counter() - started
    seconds = []
    for _ in range(repeats):
        started = time.perf_counter()
        loss = step()
        seconds.append(time.perf_counter() - started)
    return {"loss": loss, "first_step_seconds": first, "step_seconds": seconds}


def run_jax(name: str, rows: list[Row], repeats: int) -> dict[str, object]:
    """One of our own variants: loss and gradients of the adapter for all rows."""
    import jax
    import jax.numpy as jnp

    from portlab_jax.lora import AdapterOptions
    from portlab_jax.mesh import MeshPlan
    from portlab_jax.packing import Batch, pack_batch, plan_layout
    from portlab_jax.step import batch_loss
    from portlab_jax.weights import load_params

    folder = default_model().path
    config = GemmaConfig.load(folder)
    params = load_params(folder, config, jnp.dtype(jnp.float32), MeshPlan.create(RECIPE.mesh))
    options = AdapterOptions.from_recipe(RECIPE.lora)
    packed, all_logits = name.startswith("packed"), name.endswith("all logits")
    parts = [rows] if packed else [rows[i : i + MICRO_BATCH] for i in range(0, len(rows), MICRO_BATCH)]
    layout = plan_layout(parts, share_prefix=packed, pack=packed)

    def widen(batch: Batch) -> Batch:
        """Score every position; those without supervision weigh nothing."""
        size = layout.rows * layout.row_length
        targets, weights = np.zeros((1, size), np.int32), np.zeros((1, size), np.float32)
        real = np.flatnonzero(batch.weights[0])
        targets[0, batch.slots[0, real]] = batch.targets[0, real]
        weights[0, batch.slots[0, real]] = 1.0
        return batch._replace(slots=np.arange(size, dtype=np.int32)[None], targets=targets, weights=weights)

    batches = [pack_batch(part, layout, pack=packed) for part in parts]
    chunk = layout.chunk
    if all_logits:
        batches = [widen(b) for b in batches]
        chunk = layout.row_length
    adapter = {"lora": jax.tree.map(jnp.asarray, adapter_values(config))}
    grad = jax.jit(lambda ad, p, b: jax.value_and_grad(batch_loss)(ad, p, b, config, options, chunk))
    counts = [float(b.weights.sum()) for b in batches]

    def step() -> float:
        total, grads = 0.0, None
        for batch, count in zip(batches, counts, strict=True):
            loss, g = grad(adapter, params, batch)
            total += float(loss) * count
            g = jax.tree.map(lambda x, c=count: x * (c / sum(counts)), g)
            grads = g if grads is None else jax.tree.map(jnp.add, grads, g)
        jax.block_until_ready(grads)
        return total / sum(counts)

    tokens = len(parts) * layout.tokens_per_step
    logits = sum(b.slots.shape[1] for b in batches)
    counted = {k: v * len(parts) for k, v in gflop(config, layout, logits // len(parts)).items()}
    return timed(step, repeats) | {"token_positions": tokens, "logit_positions": logits, "gflop_counted": counted}


def gflop(config: GemmaConfig, layout: "Layout", logits: int) -> dict[str, float]:
    """Multiplications and additions of one pass over a layout, forward and backward, counted by part, in 10^9.

    Frozen weights take two products (forward, gradient of the input), adapters three, attention twice its forward
    in the backward pass, the head two per scored position.
    """
    n, layers = layout.tokens_per_step, config.num_hidden_layers
    linears = [p for p in param_table(config) if p.target]
    adapted = match_targets(param_table(config), RECIPE.lora.targets)
    seen = layout.prefix**2 + layout.rows * layout.row_length * (layout.prefix + layout.row_length)
    width = config.num_attention_heads * config.head_dim
    parts = {
        "frozen linear layers": 2 * 2 * n * layers * sum(p.shape[0] * p.shape[1] for p in linears),
        "loss": 2 * 2 * logits * config.vocab_size * config.hidden_size,
        "attention": 3 * 2 * 2 * layers * seen * width,
        "adapters": 3 * 2 * n * layers * RECIPE.lora.rank * sum(sum(p.shape) for p in adapted),
    }
    return {name: flop / 1e9 for name, flop in parts.items()}


def run_peft(rows: list[Row], repeats: int) -> dict[str, object]:
    """transformers + PEFT on the same rows, labels -100 outside the supervised tokens."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    folder = default_model().path
    config = GemmaConfig.load(folder)
    lora = RECIPE.lora
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, use_cache=False)
    model = get_peft_model(base, LoraConfig(r=lora.rank, lora_alpha=lora.alpha, target_modules=list(lora.targets)))
    state = dict(model.named_parameters())
    values = adapter_values(config)
    with torch.no_grad():
        for param in match_targets(param_table(config), lora.targets):
            for i in range(config.num_hidden_layers):
                stem = f"base_model.model.{param.module(i)}"
                state[f"{stem}.lora_A.default.weight"].copy_(torch.from_numpy(values[param.name]["a"][i].T.copy()))
                state[f"{stem}.lora_B.default.weight"].copy_(torch.from_numpy(values[param.name]["b"][i].T.copy()))
    longest = max(len(row.ids) for row in rows)
    ids = torch.zeros(len(rows), longest, dtype=torch.long)
    mask, labels = torch.zeros_like(ids), torch.full_like(ids, -100)
    for r, row in enumerate(rows):
        n = len(row.ids)
        ids[r, :n], mask[r, :n] = torch.tensor(row.ids), 1
        labels[r, :n] = torch.where(torch.tensor(row.loss), ids[r, :n], -100)
    supervised = int((labels != -100).sum())

    def step() -> float:
        model.zero_grad(set_to_none=True)
        total = 0.0
        for i in range(0, len(rows), MICRO_BATCH):
            part = slice(i, i + MICRO_BATCH)
            out = model(
                input_ids=ids[part], attention_mask=mask[part], labels=labels[part], num_items_in_batch=supervised
            )
            out.loss.backward()
            total += out.loss.item()
        return total

    return timed(step, repeats) | {"token_positions": ids.numel(), "logit_positions": ids.numel()}


def measure(name: str, count: int, repeats: int) -> dict[str, object]:
    """Run one contender in this process."""
    rows = load_rows(count)
    figures = run_peft(rows, repeats) if name == "peft" else run_jax(name, rows, repeats)
    median = statistics.median(figures["step_seconds"])  # type: ignore[arg-type]
    return figures | {"examples_per_second": len(rows) / median, "peak_rss_bytes": peak_rss_bytes(), "rows": len(rows)}


def in_process_of_its_own(name: str, count: int, repeats: int) -> dict[str, object]:
    """Run one contender in a fresh process; a failure is fatal and says so."""
    print(f"{name} ...", file=sys.stderr, flush=True)
    done = subprocess.run(
        [sys.executable, __file__, "--contender", name, "--rows", str(count), "--repeats", str(repeats)],
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"bench_step: the contender {name!r} could not run (exit code {done.returncode})")
    return dict(json.loads(done.stdout.splitlines()[-1]))


def main() -> None:
    """Measure every contender and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=5, help="timed steps of the fast contenders; slow ones take 1")
    parser.add_argument("--contender", choices=CONTENDERS)
    args = parser.parse_args()
    if args.contender:
        print(json.dumps(measure(args.contender, args.rows, args.repeats)))
        return
    figures = {}
    for name in CONTENDERS:
        repeats = args.repeats if name.startswith("packed") else 1
        figures[name] = in_process_of_its_own(name, args.rows, repeats)
    figures["packed, again"] = in_process_of_its_own("packed", args.rows, args.repeats)
    losses = [f["loss"] for f in figures.values()]
    if max(losses) - min(losses) > 1e-4 * max(losses):
        raise SystemExit(f"bench_step: the contenders do not compute the same loss: {losses}")
    # The slower of the two runs of ours stands against the others.
    ours = min(figures["packed"]["examples_per_second"], figures["packed, again"]["examples_per_second"])
    ratios = {f"packed / {name}": ours / figures[name]["examples_per_second"] for name in CONTENDERS[1:]}
    result = write_result("bench_step", ("jax", "jaxlib", "torch", "transformers", "peft", "numpy"), figures, ratios)
    print("| contender | examples/s | step, s | token positions | logit positions | peak memory, GiB | packed is |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    for name, f in figures.items():
        ratio = f"{ratios[key]:.1f}x" if (key := f"packed / {name}") in ratios else ""
        print(
            f"| {name} | {f['examples_per_second']:.2f} | {statistics.median(f['step_seconds']):.2f} "
            f"| {f['token_positions']} | {f['logit_positions']} | {f['peak_rss_bytes'] / 2**30:.1f} | {ratio} |"
        )
    counted = figures["packed"]["gflop_counted"]
    shares = ", ".join(f"{name} {value:.0f} ({value / sum(counted.values()):.0%})" for name, value in counted.items())
    print(f"\npacked step, GFLOP counted: {shares}")
    print(f"same loss in all: {losses[0]:.5f}; written to {result.name}")


if __name__ == "__main__":
    main()
