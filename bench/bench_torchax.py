"""train-torchax beside train-jax, and beside the loop that torchax's tutorials have.

    nox -s bench_torchax                        both parts; bench/results/bench_torchax.json
    nox -s bench_torchax -- --part loop         one part (nothing is written)

`stacks`: Gemma 3 270M in float32, the rows of fitness-213, 32 in a step, the job of bench_train: the same batches,
rank, targets and initial adapter. Packed as each trainer packs, and with every example in a padded row of its own, four
of them at a time, which shows the two programs without the packing.

`loop`: the same rows, two in a step, padded, as `torchax.train.make_train_step` takes them; as it is, compiled by
`jax.jit`, and train-torchax on the same padded rows and on packed ones.

The losses of every step must agree. The first step compiles and is not counted.
"""

import argparse
from typing import Any

from bench_train import LORA
from bench_train import job as train_job
from contenders import print_table, require_equal_losses, run_all
from result_file import write_result

STACKS = ("train-torchax", "train-jax", "train-torchax, padded rows", "train-jax, padded rows")
LOOP = ("train-torchax", "train-torchax, padded rows", "torchax's loop, jitted", "torchax's loop")
ROWS = {"stacks": 32, "loop": 2}
PADDED = 4  # rows at a time where each is padded


def measure(part: str, steps: int) -> dict[str, dict[str, Any]]:
    """The figures of a part's contenders, whose losses agree."""
    names, rows = STACKS if part == "stacks" else LOOP, ROWS[part]
    job = train_job("fitness", steps, rows, min(PADDED, rows))
    job.settings.micro_batch.update({name: min(PADDED, rows) if "padded" in name else rows for name in names})
    figures = run_all(job, names, {})
    print(f"\n{part}: {steps} steps of {rows} rows\n")
    print_table(figures)
    require_equal_losses(figures, "float32")
    return figures


def main() -> None:
    """Run both parts, or one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=tuple(ROWS))
    parser.add_argument("--steps", type=int, help="of each part")
    args = parser.parse_args()
    steps = {"stacks": args.steps or 3, "loop": args.steps or 4}
    results = {part: measure(part, steps[part]) for part in ([args.part] if args.part else steps)}
    compared: dict[str, float] = {}

    def compare(part: str, one: str, other: str) -> None:
        speed, memory = (
            results[part][one][what] / results[part][other][what]
            for what in ("examples_per_second", "peak_memory_bytes")
        )
        compared.update({f"speed: {one} / {other}": speed, f"memory: {one} / {other}": memory})

    if "stacks" in results:
        compare("stacks", *STACKS[:2])
        compare("stacks", *STACKS[2:])
    if "loop" in results:
        for other in LOOP[2:]:
            for one in LOOP[:2]:
                compare("loop", one, other)
    print("\n" + "\n".join(f"{what}: {value:.2f}" for what, value in compared.items()))
    if not args.part:
        file = write_result(
            "bench_torchax",
            ("jax", "jaxlib", "torch", "torchax", "transformers", "peft", "optax", "numpy"),
            {f"{part}: {name}": f for part, found in results.items() for name, f in found.items()},
            compared,
            steps=steps,
            rows=ROWS,
            lora_rank=LORA.rank,
        )
        print(f"\nwritten to {file.name}")


if __name__ == "__main__":
    main()
