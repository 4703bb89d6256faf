"""Our training step and Tunix's, compiled by the TPU compiler for the same slice: memory, FLOPs, traffic, seconds.

    nox -s bench_plan                        everything; bench/results/bench_plan.json
    nox -s bench_plan -- --only gemma3-270m  one model (nothing is written)
    nox -s bench_plan -- --work FOLDER       keeps the compiled programs there, and takes those that are there

Nobody's program runs: no TPU is needed. Both are what the trainers themselves jit for LoRA of rank 16 on all seven
projections over a bfloat16 base, 32 rows of one length, on v5e-8 with the weights split over the eight chips, and both
are counted by the same code from what the compiler made of them. `equal` has every token predicted, as Tunix's loss
has; `tool calls` is what ours makes of rows of which an eighth are targets, on the mesh that it chooses itself, where
Tunix's step stays what it is. `DIFFERS` says in what the equal ones are not.

One compilation at a time. Compile seconds are those of this machine, whatever else it does meanwhile.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

from peers.compile_job import ENVIRONMENT, CompileJob, read_job, write_job
from portlab_jax.planner.estimate import bound_of
from portlab_jax.planner.plan import compile_job
from portlab_jax.planner.program import Program, describe
from portlab_jax.planner.records import Job
from portlab_spec.errors import CheckFailed, UserError
from portlab_spec.files import read_json
from portlab_spec.hardware import parse_slice
from portlab_spec.recipe import Lora, Recipe
from result_file import write_result

Figures = dict[str, Any]

PEER = Path(__file__).parent / "peers/tunix_compile.py"
TUNIX_PYTHON = Path(__file__).parents[1] / ".nox/bench_tunix/bin/python"
SLICE = parse_slice("v5e-8")
ROWS = 32
LORA = Lora(rank=16, alpha=32.0, train_control_rows=False)
TUNIX_MODULES = ".*(q_einsum|kv_einsum|attn_vec_einsum|gate_proj|up_proj|down_proj)"
DIFFERS = (
    "Tunix keeps its adapter and AdamW's moments in bfloat16, the base's type; ours are float32",
    "Tunix has one A for keys and values together; ours has one each",
    "Tunix gathers no logits: every position has its own, whatever the targets are",
    "Tunix accumulates by calling a step of some of the rows, whose gradients wait in HBM: its FLOPs, bytes and sent "
    "bytes are those of a call times the calls; ours is one program for all rows",
    "Tunix makes logits and their log-softmax in bfloat16; ours are float32, whose bytes are twice as many",
    "ours attends with a Pallas kernel (splash), which computes scores again in the backward pass and skips blocks in "
    "which the mask leaves nothing; Tunix with a mask and XLA's softmax over every pair",
)
COMPARED = {
    "peak HBM": "peak_hbm_bytes",
    "temporaries": "temporary_bytes",
    "FLOPs": "flops",
    "bytes to and from HBM": "hbm_bytes",
    "bytes sent": "sent_bytes",
    "bound": "bound_seconds",
    "compile seconds": "compile_seconds",
}


class Setting(NamedTuple):
    """How a batch is computed: `remat` as ours names it and as Tunix does."""

    title: str
    accumulate: int
    remat: tuple[str, str]


class Case(NamedTuple):
    """A model by the names that the two have for it, and the tokens of a row."""

    model: str
    tunix_model: str
    length: int
    settings: tuple[Setting, ...]


ONE_BATCH = Setting("one batch", 1, ("none", "none"))
CASES = {
    "gemma3-270m": Case("google/gemma-3-270m", "gemma3_270m", 512, (ONE_BATCH,)),
    # In one batch without remat, Tunix's step does not fit.
    "gemma3-1b": Case(
        "google/gemma-3-1b",
        "gemma3_1b",
        2048,
        (Setting("4 x 8 rows", 4, ("none", "none")), Setting("one batch, remat", 1, ("block", "decoder"))),
    ),
}


def tunix(case: Case, setting: Setting, folder: Path, python: Path) -> Figures:
    """Tunix's step, compiled unless the folder has it.

    Raises:
        UserError: there is no such interpreter.
        CheckFailed: the compiler died.
    """
    job = CompileJob(
        model=case.tunix_model,
        topology=SLICE.compiler_topology,
        device_kind="TPU v5 lite",
        fsdp=SLICE.devices,
        tp=1,
        rank=LORA.rank,
        alpha=LORA.alpha,
        module_path=TUNIX_MODULES,
        batch=ROWS // setting.accumulate,
        length=case.length,
        accumulation=setting.accumulate,
        remat=setting.remat[1],
    )
    if not is_done(folder, job):
        if not python.exists():
            raise UserError("no interpreter for Tunix", where=str(python), fix="Make it: nox -s bench_tunix")
        shutil.rmtree(folder, ignore_errors=True)  # what another job left would pass for this one's
        write_job(folder, job)
        done = subprocess.run([python, PEER, folder], env=os.environ | ENVIRONMENT, stdout=sys.stderr, check=False)
        if not is_done(folder, job):
            raise CheckFailed(
                f"Tunix's step was not compiled (exit code {done.returncode})", where=folder.name, fix="See above"
            )
    return figures_of(read_tunix(folder), setting.accumulate) | {
        "trained_values": read_json(folder / "parameters.json", "parameters")["adapter"],
        "versions": read_json(folder / "versions.json", "versions"),
    }


def is_done(folder: Path, job: CompileJob) -> bool:
    """Whether a work folder has what became of this very job; the last file of each outcome tells."""
    if not (folder / "job.json").is_file() or read_job(folder) != job:
        return False
    refused = (folder / "refused.txt").is_file() and (folder / "seconds.json").is_file()
    return refused or (folder / "cost.json").is_file()


class PeerProgram:
    """What the peer left of a compiled program, with the methods of `jax.stages.Compiled` that describe one."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def memory_analysis(self) -> SimpleNamespace:
        """As XLA names it."""
        sizes = read_json(self._folder / "memory.json", "memory")
        peak = sizes.pop("peak")
        return SimpleNamespace(
            **{f"{kind}_size_in_bytes": size for kind, size in sizes.items()}, peak_memory_in_bytes=peak
        )

    def cost_analysis(self) -> dict[str, float]:
        """As XLA counts, loops once."""
        return read_json(self._folder / "cost.json", "costs")

    def as_text(self) -> str:
        """Optimised HLO."""
        return (self._folder / "compiled.hlo.txt").read_text()


def read_tunix(folder: Path) -> Program:
    """The program that the peer compiled, read as one of ours would be.

    Raises:
        CheckFailed: it does not fit.
    """
    if (folder / "refused.txt").is_file():
        raise CheckFailed("Tunix's step does not fit", where=folder.name, fix="Choose another setting for it in CASES")
    seconds = read_json(folder / "seconds.json", "seconds")
    return describe(PeerProgram(folder), seconds["lower"], seconds["compile"])


def portlab(case: Case, setting: Setting, supervised: int, mesh: dict[str, int]) -> Figures:
    """Our step, as `plan-tpu` compiles it.

    Raises:
        CheckFailed: the trainer refuses the recipe, or the compiler died.
    """
    recipe = Recipe.model_validate(
        {
            "name": "bench_plan",
            "model": case.model,
            "lora": LORA,
            "batch_size": ROWS,
            "accumulate": setting.accumulate,
            "remat": setting.remat[0],
            "max_length": case.length,
            "mesh": mesh,
            "dtype": "bfloat16",
            "share_prefix": False,
            "pack": False,
        }
    )
    result = compile_job(Job("train", recipe.model_dump(mode="json"), SLICE.name, case.length, supervised))
    if result.error:
        raise CheckFailed(result.error, where=case.model, fix="See CASES in bench/bench_plan.py")
    (shape,) = result.programs["shapes"]
    program = Program.from_json(shape["program"])
    if not program.fits:
        raise CheckFailed("our step does not fit", where=case.model, fix="Choose another setting in CASES")
    return figures_of(program, 1) | {
        "mesh": result.programs["mesh"],
        "attention": shape["attention"],
        "token_positions": shape["positions"],
        "logit_positions": shape["slots"],
        "versions": result.versions,
    }


def figures_of(program: Program, calls: int) -> Figures:
    """A device's memory, and what it computes and moves for an update of so many calls of a program that fits."""
    assert program.memory is not None
    flops, hbm_bytes, sent = calls * program.flops, calls * program.bytes, calls * program.sent_bytes
    roof = bound_of(flops, hbm_bytes, sent, SLICE)
    return {
        "calls": calls,
        "peak_hbm_bytes": program.needed,
        "argument_bytes": program.memory.arguments,
        "temporary_bytes": program.memory.temporaries,
        "output_bytes": program.memory.output,
        "code_bytes": program.memory.code,
        "flops": flops,
        "hbm_bytes": hbm_bytes,
        "sent_bytes": sent,
        "bound_seconds": roof.seconds,
        "bound_by": roof.bound,
        "collectives": {kind: calls * runs for kind, runs in program.collectives.items()},
        "uncounted_kernels": program.kernels,
        "unknown_loops": program.unknown_loops,
        "lower_seconds": program.lower_seconds,
        "compile_seconds": program.compile_seconds,
    }


def contenders(name: str, work: Path, python: Path) -> Iterator[tuple[str, str, Figures]]:
    """Every setting of a case with its contenders: setting, contender, figures."""
    case = CASES[name]
    for setting in case.settings:
        where = f"{name}, {setting.title}"
        print(f"{where} ...", file=sys.stderr, flush=True)
        yield where, "tunix", tunix(case, setting, work / where.replace(", ", "-").replace(" ", "-"), python)
        yield where, "portlab, equal", portlab(case, setting, case.length - 1, {"fsdp": SLICE.devices})
        yield where, "portlab, tool calls", portlab(case, setting, case.length // 8, {})


def ratios(figures: dict[str, dict[str, Figures]]) -> dict[str, float]:
    """Ours over Tunix's."""
    return {
        f"{where}: {what}, {name} / tunix": round(ours[key] / by_name["tunix"][key], 4)
        for where, by_name in figures.items()
        for name, ours in by_name.items()
        if name != "tunix"
        for what, key in COMPARED.items()
    }


def table(figures: dict[str, dict[str, Figures]]) -> list[str]:
    """Lines of a Markdown table."""
    lines = [
        "| step | contender | peak HBM, GiB | arguments | temporaries | TFLOP | HBM traffic, GB | sent, GB | bound, ms "
        "| compile, s | lower, s |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for where, by_name in figures.items():
        for name, f in by_name.items():
            cells = [
                where,
                name,
                *(f"{f[key] / 2**30:.2f}" for key in ("peak_hbm_bytes", "argument_bytes", "temporary_bytes")),
                f"{f['flops'] / 1e12:.2f}",
                f"{f['hbm_bytes'] / 1e9:.1f}",
                f"{f['sent_bytes'] / 1e9:.2f}",
                f"{f['bound_seconds'] * 1e3:.1f} ({f['bound_by']})",
                f"{f['compile_seconds']:.0f}",
                f"{f['lower_seconds']:.0f}",
            ]
            lines.append("| " + " | ".join(cells) + " |")
    return lines


def run(names: list[str], work: Path, python: Path) -> dict[str, dict[str, Figures]]:
    """Figures by setting and contender. Our programs, too, are remembered in the work folder and nowhere else."""
    os.environ["PORTLAB_CACHE"] = str(work)
    figures: dict[str, dict[str, Figures]] = {}
    for name in names:
        for where, contender, found in contenders(name, work, python):
            figures.setdefault(where, {})[contender] = found
            print(table({where: {contender: found}})[-1], file=sys.stderr, flush=True)
    return figures


def main() -> None:
    """Compile every contender and write what came of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=CASES)
    parser.add_argument("--work", type=Path, help="folder for the compiled programs; otherwise they are not kept")
    parser.add_argument("--tunix-python", type=Path, default=TUNIX_PYTHON)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bench-plan-") as temporary:
        figures = run([args.only] if args.only else list(CASES), args.work or Path(temporary), args.tunix_python)
    compared = ratios(figures)
    print("\n".join([*table(figures), "", *(f"{what}: {value:.2f}" for what, value in compared.items())]))
    if args.only:
        return
    path = write_result(
        "bench_plan",
        ("jax", "jaxlib", "libtpu"),
        {f"{where}: {name}": f for where, by_name in figures.items() for name, f in by_name.items()},
        compared,
        evidence="compiled",
        slice=SLICE.explain(),
        rows=ROWS,
        differs=DIFFERS,
    )
    print(f"written to {path.name}")


if __name__ == "__main__":
    main()
