"""Examples per second of one training step: ours, its own plain variants, and transformers + PEFT.

    nox -s bench_step                     all contenders, writes bench/results/bench_step.json
    nox -s bench_step -- --rows 16        another batch size

All contenders take the same rows of fitness-213, the same adapter values, float32, and must report the same loss.
Each runs in a process of its own, so that peak memory is its own; the first contender runs again at the end, so that
a machine that slowed down meanwhile shows. What cannot hold the whole batch in memory accumulates gradients over
micro-batches of 4 rows.

    packed            what train-jax runs: a tree of the rows, logits at supervised positions
    packed, remat dots        the same, which keeps only the results of matrix products for the backward pass
    packed, remat block       the same, which keeps only the inputs of layers
    packed, all logits        the same with logits at every position of the tree
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
from typing import TYPE_CHECKING, Any

import numpy as np

from portlab_spec.assets import default_model
from portlab_spec.data import load_dataset
from portlab_spec.data.tokens import Row, tokenize
from portlab_spec.formats import FORMATS
from portlab_spec.models import GemmaConfig
from portlab_spec.recipe import Mesh, load_recipe
from portlab_spec.report import peak_rss_bytes
from portlab_spec.tokenizer import Tokenizer
from result_file import write_result
from train_jobs import adapter_values

if TYPE_CHECKING:
    from portlab_jax.setup import Setup
    from portlab_spec.packing import Batch, Layout

MICRO_BATCH = 4
LOGITS_AT_A_TIME = 128  # where all are computed
RECIPE = load_recipe("functiongemma-fitness").model_copy(
    update={"dtype": "float32", "mesh": Mesh(data=1, fsdp=1, tp=1)}
)
CONTENDERS = (
    "packed",
    "packed, remat dots",
    "packed, remat block",
    "packed, all logits",
    "padded, gathered logits",
    "padded, all logits",
    "peft",
)


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

    from portlab_jax.compiled import Compiled
    from portlab_jax.lora import adapter_shardings
    from portlab_jax.setup import set_up
    from portlab_jax.step import gradients
    from portlab_spec.packing import pack_batch

    packed, all_logits = name.startswith("packed"), name.endswith("all logits")
    remat = name.rpartition(" remat ")[2] if "remat" in name else "none"
    recipe = RECIPE.model_copy(update={"share_prefix": packed, "pack": packed, "remat": remat})
    setup = set_up(recipe, default_model(), ())
    layout = setup.plan([rows], accumulate=1 if packed else len(rows) // MICRO_BATCH).layout(0)
    batch, chunk = pack_batch(rows, layout), layout.chunk
    counted = gflop(setup, batch)
    if all_logits:
        chunk = LOGITS_AT_A_TIME
        batch = widen(batch, layout, chunk)
    leaves, options = setup.options.adapter.leaves, setup.for_layout(layout)
    values = adapter_values(setup.config, RECIPE.lora)
    stacked = {
        leaf.key: {w: np.stack([values[f"{module}.{w}"] for module in leaf.modules("")]) for w in ("a", "b")}
        for leaf in leaves
    }
    with jax.set_mesh(setup.mesh.mesh):
        adapter = jax.device_put({"lora": stacked}, adapter_shardings(leaves, setup.mesh))
        placed = setup.mesh.put_rows(batch, axis=1)
        compiled = Compiled(jax.jit(lambda a, f, b: gradients(a, f, b, options, chunk)), name)

        def step() -> float:
            sums, total, grads = compiled(adapter, setup.frozen, placed)
            jax.block_until_ready(grads)
            return float(sums.loss / total)

        figures = timed(step, repeats)
    memory = compiled.memory
    return figures | {
        "token_positions": layout.tokens_per_step,
        "logit_positions": batch.slots.size,
        "gflop_counted": counted,
        "planned_activation_bytes": memory.temporaries if memory else None,
    }


def widen(batch: "Batch", layout: "Layout", multiple: int) -> "Batch":
    """Score every position: those without supervision weigh nothing."""
    positions = layout.rows * layout.row_length
    parts = []
    for slots, targets, weights in zip(*(x.reshape(layout.packing.parts, -1) for x in batch[2:]), strict=True):
        real = weights > 0
        rest = np.setdiff1d(np.arange(positions, dtype=np.int32), slots[real])
        zeros = np.zeros_like(rest)
        parts.append((np.append(slots[real], rest), np.append(targets[real], zeros), np.append(weights[real], zeros)))
    # A slot that two rows supervise with two targets counts twice.
    size = -(-max(len(part[0]) for part in parts) // multiple) * multiple
    wide = [np.stack([np.pad(x, (0, size - len(x))) for x in column]) for column in zip(*parts, strict=True)]
    slots, targets, weights = (x.reshape(layout.accumulate, layout.groups, size) for x in wide)
    return batch._replace(slots=slots, targets=targets, weights=weights.astype(np.float32))


def gflop(setup: "Setup", batch: "Batch") -> dict[str, float]:
    """Model FLOPs of a step by part, in 10^9, by the formula of `portlab_spec.models.flops`."""
    from portlab_spec.models.flops import ModelSize, StepSize, attention_size, step_flops, visible_pairs

    config, size, held = setup.config, setup.size(), batch.rows.ends > 0
    attention = attention_size(
        (visible_pairs(batch.rows.positions, held, kind.window), config.num_attention_heads, kind.head_dim)
        for kind in config.layers
    )
    tokens, slots = int(held.sum()), int((batch.weights > 0).sum())
    parts = {
        "frozen linear layers": (ModelSize(size.linears, 0, 0), StepSize(tokens, 0, 0)),
        "loss": (ModelSize(0, 0, size.head), StepSize(0, 0, slots)),
        "attention": (ModelSize(0, 0, 0), StepSize(0, attention, 0)),
        "adapters": (ModelSize(0, size.adapters, 0), StepSize(tokens, 0, 0)),
    }
    return {name: step_flops(*sizes) / 1e9 for name, sizes in parts.items()}


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
    with torch.no_grad():
        for name, value in adapter_values(config, lora).items():
            module, _, which = name.rpartition(".")
            leaf = state[f"base_model.model.model.{module}.lora_{which.upper()}.default.weight"]
            leaf.copy_(torch.from_numpy(value.T.copy()))
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


def in_process_of_its_own(name: str, count: int, repeats: int) -> dict[str, Any]:
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
    figures: dict[str, dict[str, Any]] = {}
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
    print(
        "| contender | examples/s | step, s | token positions | logit positions | activations, GiB "
        "| peak memory, GiB | packed is |"
    )
    print("|---|---:|---:|---:|---:|---:|---:|---:|")
    for name, f in figures.items():
        ratio = f"{ratios[key]:.1f}x" if (key := f"packed / {name}") in ratios else ""
        planned = f"{f['planned_activation_bytes'] / 2**30:.2f}" if f.get("planned_activation_bytes") else ""
        print(
            f"| {name} | {f['examples_per_second']:.2f} | {statistics.median(f['step_seconds']):.2f} "
            f"| {f['token_positions']} | {f['logit_positions']} | {planned} "
            f"| {f['peak_rss_bytes'] / 2**30:.1f} | {ratio} |"
        )
    counted = figures["packed"]["gflop_counted"]
    shares = ", ".join(f"{name} {value:.0f} ({value / sum(counted.values()):.0%})" for name, value in counted.items())
    print(f"\npacked step, model GFLOP: {shares}")
    print(f"same loss in all: {losses[0]:.5f}; written to {result.name}")


if __name__ == "__main__":
    main()
