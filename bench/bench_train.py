"""Training side by side: ours, Tunix's PeftTrainer, and TRL's SFTTrainer with PEFT.

    nox -s bench_train                            both data sets, all contenders; bench/results/bench_train.json
    nox -s bench_train -- --data fitness          one of them (nothing is written)
    nox -s bench_train -- --contender tunix       one contender (nothing is written)

All take the same optimiser steps: the same batches of 32 rows in the same order, the same rank, targets and initial
adapter, float32, AdamW with a constant rate and clipped gradients, no dropout; the loss of every step must agree.
Gemma 3 270M on two kinds of rows: `fitness`, whose prompts all begin with the same seven declarations, and `dolly`,
which share nothing. What each peer is allowed stands at the top of its runner in bench/peers.

No contender's memory holds the whole batch without sharing, so gradients are accumulated, weighted by token: the peers
take 2 rows at a time, which on a CPU is as fast as more and needs the least memory; ours takes all rows of `fitness` at
once, which hold little more than one row's tokens, and 4 of `dolly`.

Targets are the five modules in which all can hold the same adapter: Tunix has one A for keys and values together.
Ours runs first and last, and the slower of the two counts, so that a machine that slowed down meanwhile shows.
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from contenders import CONTENDERS, print_table, ratios, require_equal_losses, run_all
from peers.exchange import Job, Row, Settings
from portlab_spec.assets import default_model
from portlab_spec.models import GemmaConfig
from portlab_spec.recipe import Lora
from result_file import write_result
from train_jobs import TARGETS, adapter_values, dolly_rows, fitness_rows

DATA: dict[str, Callable[[], list[Row]]] = {"fitness": fitness_rows, "dolly": dolly_rows}
LORA = Lora(rank=32, alpha=64, targets=TARGETS, train_control_rows=False)
TUNIX_PYTHON = Path(__file__).parents[1] / ".nox/bench_tunix/bin/python"


def job(data: str, steps: int, batch_size: int, micro_batch: int) -> Job:
    """What all contenders do: the data's rows in order, from the start again when they run out."""
    rows = DATA[data]()
    batches = [[rows[(step * batch_size + i) % len(rows)] for i in range(batch_size)] for step in range(steps)]
    folder = default_model().path
    settings = Settings(
        model=str(folder),
        device="cpu",
        dtype="float32",
        rank=LORA.rank,
        alpha=LORA.alpha,
        targets=LORA.targets,
        learning_rate=4e-4,
        b1=0.9,
        b2=0.99,
        eps=1e-8,
        weight_decay=0.0,
        clip_norm=1.0,
        micro_batch=dict.fromkeys(CONTENDERS, micro_batch)
        | {"portlab": batch_size if data == "fitness" else min(2 * micro_batch, batch_size)},
    )
    return Job(settings, batches, adapter_values(GemmaConfig.load(folder), LORA))


def main() -> None:
    """Run the contenders on each data set, hold their losses together, write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", choices=DATA)
    parser.add_argument("--contender", choices=CONTENDERS)
    parser.add_argument("--steps", type=int, default=4, help="optimiser steps; the first compiles and is not counted")
    parser.add_argument("--rows", type=int, default=32, help="of a step")
    parser.add_argument("--micro-batch", type=int, default=2, help="rows that the peers compute at a time")
    parser.add_argument("--tunix-python", type=Path, default=TUNIX_PYTHON)
    args = parser.parse_args()
    names = [args.contender] if args.contender else [*CONTENDERS, CONTENDERS[0]]
    results: dict[str, Any] = {}
    for data in [args.data] if args.data else DATA:
        figures = run_all(job(data, args.steps, args.rows, args.micro_batch), names, {"tunix": args.tunix_python})
        print(f"\n{data}: {args.steps} steps of {args.rows} rows\n")
        print_table(figures)
        worst = require_equal_losses(figures, "float32")
        compared = ratios(figures)
        print("\n" + "\n".join(f"{what}: {value:.2f}" for what, value in compared.items()))
        results[data] = {"figures": figures, "ratios": compared, "largest_relative_loss_difference": worst}
    if not args.data and not args.contender:
        file = write_result(
            "bench_train",
            ("jax", "jaxlib", "torch", "transformers", "peft", "trl", "numpy"),
            {f"{data}: {name}": f for data, result in results.items() for name, f in result["figures"].items()},
            {f"{data}: {what}": value for data, result in results.items() for what, value in result["ratios"].items()},
            largest_relative_loss_difference={d: r["largest_relative_loss_difference"] for d, r in results.items()},
            steps=args.steps,
            rows=args.rows,
            micro_batch=args.micro_batch,
        )
        print(f"\nwritten to {file.name}")


if __name__ == "__main__":
    main()
