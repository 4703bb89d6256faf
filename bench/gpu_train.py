"""Training on one NVIDIA GPU side by side: train-jax, Tunix's PeftTrainer, TRL's SFTTrainer with PEFT, and train-xla.

    python bench/gpu_train.py                       all cases; bench/results/gpu_train.json
    python bench/gpu_train.py --contender portlab   one contender (nothing is written)
    python bench/gpu_train.py --tiny                the same code on a CPU with toy shapes, to see that it runs

Random weights in the shapes of Gemma 3 270M and 1B, bfloat16, LoRA of rank 32 on five modules (see bench_train). Rows
of 512 and 2048 random tokens, 32,768 in a step: `ordinary` rows share nothing and supervise every token but the first;
`shared` rows have three quarters in common and supervise the rest. Each contender takes as many rows at a time as fits
beside its logits. They need environments of their own; `--python NAME=PATH` names an interpreter.

Tokens per second count the rows as given. Model FLOP/s, for ordinary rows alone, are those that the step cannot do
without, over the GPU's dense bfloat16 peak (`portlab_spec.models.flops`): recomputation and padding do not count.
"""

import argparse
import itertools
import math
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from contenders import print_table, ratios, require_equal_losses, run_all
from peers.exchange import Job, Row, Settings
from portlab_spec.models import GemmaConfig, param_table, plan_adapter
from portlab_spec.models.flops import ModelSize, StepSize, attention_size, mfu, step_flops, visible_pairs
from portlab_spec.recipe import Lora
from result_file import write_result
from train_jobs import TARGETS, adapter_values, gemma3_shape, random_rows, write_random_model

LORA = Lora(rank=32, alpha=64, targets=TARGETS, train_control_rows=False)


class Scale(NamedTuple):
    """Sizes of a run of this benchmark.

    Attributes:
        models: name -> layers, hidden size, MLP width and further arguments of `gemma3_shape`.
        lengths: of the rows.
        tokens: in a step.
        at_a_time: every contender, and the tokens that it computes at a time.
        device, dtype: as in `Settings`.
    """

    models: dict[str, dict[str, Any]]
    lengths: tuple[int, ...]
    tokens: int
    at_a_time: dict[str, int]
    device: str
    dtype: str


GPU = Scale(
    models={
        "270m": {"layers": 18, "hidden": 640, "mlp": 2048},
        "1b": {"layers": 26, "hidden": 1152, "mlp": 6912},
    },
    lengths=(512, 2048),
    tokens=32_768,
    # Tunix holds several float32 arrays of logits: 4 GiB each for 4,096 tokens.
    at_a_time={"portlab": 8_192, "tunix": 4_096, "trl": 8_192, "train-xla cuda": 8_192},
    device="cuda",
    dtype="bfloat16",
)
TINY = Scale(
    models={"tiny": {"layers": 6, "hidden": 32, "mlp": 64, "head_dim": 16, "vocab": 96, "window": 8}},
    lengths=(32,),
    tokens=128,
    at_a_time={"portlab": 128, "tunix": 64, "trl": 64, "train-xla cpu": 64},
    device="cpu",
    dtype="float32",
)


def jobs(scale: Scale, folder: Path, steps: int) -> Iterator[tuple[str, GemmaConfig, Job]]:
    """Every case: its name, model and job."""
    for name, shape in scale.models.items():
        config = write_random_model(folder / name, gemma3_shape(**shape))
        for length, kind in itertools.product(scale.lengths, ("ordinary", "shared")):
            batch_size = scale.tokens // length
            rows = random_rows(
                steps * batch_size, length, length * 3 // 4 if kind == "shared" else 0, config.vocab_size
            )
            settings = Settings(
                model=str(folder / name),
                device=scale.device,
                dtype=scale.dtype,
                rank=LORA.rank,
                alpha=LORA.alpha,
                targets=LORA.targets,
                learning_rate=1e-4,
                b1=0.9,
                b2=0.99,
                eps=1e-8,
                weight_decay=0.0,
                clip_norm=1.0,
                micro_batch={n: min(max(tokens // length, 1), batch_size) for n, tokens in scale.at_a_time.items()},
            )
            batches = [rows[i : i + batch_size] for i in range(0, len(rows), batch_size)]
            yield f"{name} {length} {kind}", config, Job(settings, batches, adapter_values(config, LORA))


def model_flops(config: GemmaConfig, rows: Sequence[Row]) -> int:
    """FLOPs of a LoRA step over rows without common parts, by the formula of `portlab_spec.models.flops`."""
    leaves = plan_adapter(config, LORA)
    model = ModelSize(
        linears=sum(param.count * math.prod(param.shape) for param in param_table(config) if param.target),
        adapters=sum(len(leaf.index) * leaf.rank * (leaf.into.size + leaf.out.size) for leaf in leaves),
        head=config.vocab_size * config.hidden_size,
    )
    positions = np.concatenate([np.arange(len(row.ids)) for row in rows])
    held = np.ones(len(positions), bool)
    attention = attention_size(
        (visible_pairs(positions, held, kind.window), config.num_attention_heads, kind.head_dim)
        for kind in config.layers
    )
    return step_flops(model, StepSize(len(positions), attention, slots=sum(sum(row.loss) for row in rows)))


def gpu_name() -> str:
    """What the driver calls the first GPU."""
    query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    return subprocess.run(query, stdout=subprocess.PIPE, text=True, check=True).stdout.splitlines()[0]


def add_utilisation(figures: dict[str, dict[str, Any]], flops: int, gpu: str) -> None:
    """Model FLOP/s and their share of the GPU's peak, in place."""
    for figure in figures.values():
        seconds = 1 / figure["steps_per_second"]
        figure["model_flops_per_second"] = flops / seconds
        if (share := mfu(flops, seconds, 1, gpu)) is not None:
            figure["model_flops_utilisation"] = share


def interpreter(text: str) -> tuple[str, Path]:
    """NAME=PATH as a pair."""
    name, _, path = text.partition("=")
    return name, Path(path)


def main() -> None:
    """Run every case with every contender and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contender", choices={**GPU.at_a_time, **TINY.at_a_time}, action="append")
    parser.add_argument("--case", help="only cases whose name has this in it")
    parser.add_argument("--steps", type=int, default=8, help="the first compiles and is not counted")
    parser.add_argument("--python", type=interpreter, action="append", default=[], metavar="NAME=PATH")
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    scale, gpu = (TINY, "") if args.tiny else (GPU, gpu_name())
    figures: dict[str, Any] = {}
    compared: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        for case, config, job in jobs(scale, Path(folder), args.steps):
            if args.case and args.case not in case:
                continue
            measured = run_all(job, args.contender or tuple(scale.at_a_time), dict(args.python))
            if case.endswith("ordinary"):
                add_utilisation(measured, model_flops(config, job.batches[-1]), gpu)
            print(f"\n{case}: {args.steps} steps of {len(job.batches[-1])} rows\n")
            print_table(measured)
            require_equal_losses(measured, scale.dtype)
            figures |= {f"{case}: {name}": figure for name, figure in measured.items()}
            compared |= {f"{case}: {what}": value for what, value in ratios(measured).items()}
    if not (args.tiny or args.case or args.contender):
        print(f"\nwritten to {write_result('gpu_train', ('jax', 'jaxlib'), figures, compared, gpu=gpu).name}")


if __name__ == "__main__":
    main()
