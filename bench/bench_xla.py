"""TRL as it is and train-xla, on a CPU and through XLA; and what padding to one length is worth there.

    nox -s bench_xla                      all; bench/results/bench_xla.json
    nox -s bench_xla -- --part padding    one part (nothing is written)

`stacks`: Gemma 3 270M in float32, the rows of fitness-213, 32 in a step, the job of bench_train: the same batches,
rank, targets and initial adapter, and the losses of every step must agree. TRL takes two rows at a time, padding-free,
which is its fastest way here; train-xla packs the rows as trees.

`padding`: rows of 60 to 500 tokens that share nothing, eight in a step over four virtual devices, a packed row for
each. Padded to the longest of the run, every step is one program; to the longest of its batch, one for each length.
"""

import argparse
from typing import Any

from bench_train import LORA
from bench_train import job as train_job
from contenders import print_table, require_equal_losses, run_all
from result_file import write_result

STACKS = ("trl", "train-xla cpu", "train-xla xla, 1 device", "train-xla xla, 4 devices")
PADDING = ("padded to one length", "padded to each batch's length")
ROWS, MICRO = {"stacks": 32, "padding": 8}, {"stacks": 2, "padding": 8}


def measure(part: str, steps: int) -> dict[str, dict[str, Any]]:
    """The figures of a part's contenders, whose losses agree."""
    names = STACKS if part == "stacks" else PADDING
    job = train_job("fitness" if part == "stacks" else "dolly", steps, ROWS[part], MICRO[part])
    # train-xla takes a step's rows at once.
    job.settings.micro_batch.update(dict.fromkeys(names, ROWS[part]) | {"trl": MICRO[part]})
    figures = run_all(job, names, {})
    print(f"\n{part}: {steps} steps of {ROWS[part]} rows\n")
    print_table(figures)
    require_equal_losses(figures, "float32")
    return figures


def total_seconds(figure: dict[str, Any]) -> float:
    """What all steps took, compilation included."""
    return float(sum(figure["step_seconds"]))


def main() -> None:
    """Run both parts, or one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=("stacks", "padding"))
    parser.add_argument("--steps", type=int, help="of each part; the first of `stacks` compiles and is not counted")
    args = parser.parse_args()
    # A step of TRL takes minutes here.
    steps = {"stacks": args.steps or 2, "padding": args.steps or 6}
    results = {part: measure(part, steps[part]) for part in ([args.part] if args.part else steps)}
    compared: dict[str, float] = {}
    if stacks := results.get("stacks"):
        speed = {name: figure["examples_per_second"] for name, figure in stacks.items()}
        compared |= {f"speed: {name} / trl": speed[name] / speed["trl"] for name in STACKS[1:]}
        memory = {name: figure["peak_memory_bytes"] for name, figure in stacks.items()}
        compared |= {f"memory: {name} / trl": memory[name] / memory["trl"] for name in STACKS[1:]}
    if padding := results.get("padding"):
        one, each = (padding[name] for name in PADDING)
        compared["seconds: each length / one length"] = total_seconds(each) / total_seconds(one)
        compared["programs: each length / one length"] = each["device"]["compilations"] / one["device"]["compilations"]
    print("\n" + "\n".join(f"{what}: {value:.2f}" for what, value in compared.items()))
    if not args.part:
        figures = {f"{part}: {name}": f for part, found in results.items() for name, f in found.items()}
        file = write_result(
            "bench_xla",
            ("torch", "torch-xla", "transformers", "peft", "trl", "accelerate", "numpy"),
            figures,
            compared,
            steps=steps,
            rows=ROWS,
            lora_rank=LORA.rank,
        )
        print(f"\nwritten to {file.name}")


if __name__ == "__main__":
    main()
