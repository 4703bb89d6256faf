"""Preparing a tool-call data set, from a JSON Lines file to token ids and masks: ours beside TRL's.

    nox -s bench_spec                     20,000 rows; writes bench/results/bench_spec.json
    nox -s bench_spec -- --rows 2000      fewer

The rows have the make and size of google/mobile-actions (seven tools on offer, a date in the developer's message,
one or two calls with arguments as JSON text); they are generated, because that set may not be redistributed. TRL gets
the same rows as prompt and completion, its best path for them: no training template of it masks tool calls. It
renders with Gemma 4's published template, so both sides also produce the same ids, which is checked. Each side is one
process on one core with the same tokenizer, and TRL's time is that of its trainer's constructor less that for 16 rows.
"""

import argparse
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from portlab_spec.assets import default_model
from portlab_spec.formats import find_format
from portlab_spec.tokenizer import GEMMA4_TOKENS, Tokenizer
from result_file import write_result

CONTENDERS = ("portlab functiongemma", "portlab gemma4", "trl gemma4")
TOOLS: dict[str, dict[str, str]] = {
    "create_calendar_event": {
        "title": "The title of the event that is to be created in the calendar.",
        "datetime": "The date and time of the event in the format YYYY-MM-DDTHH:MM:SS, in local time.",
    },
    "create_contact": {
        "first_name": "The first name of the contact.",
        "last_name": "The last name of the contact.",
        "email": "The email address of the contact, if there is one.",
        "phone_number": "The phone number of the contact, with the country's code if it is known.",
    },
    "send_email": {
        "to": "The email address of the recipient.",
        "subject": "The subject of the email.",
        "body": "The body of the email, without a greeting unless one was asked for.",
    },
    "show_map": {"query": "The location to search for: the name of a place, a business or an address."},
    "open_wifi_settings": {},
    "turn_on_flashlight": {},
    "turn_off_flashlight": {},
}
WORDS = [
    "meeting",
    "lunch",
    "review",
    "dentist",
    "planning",
    "call",
    "with",
    "the",
    "team",
    "about",
    "budget",
    "travel",
    "Paris",
    "report",
    "project",
    "holiday",
    "new",
    "bike",
    "school",
    "concert",
    "dinner",
    "Anna",
    "Omar",
    "Mei",
    "Jonas",
    "garden",
    "repair",
    "insurance",
    "notes",
    "launch",
]


def rows(count: int) -> list[dict[str, Any]]:
    """Rows in the shape of the set: object types in capitals, arguments as JSON text."""
    rng = random.Random(0)
    out = []
    for n in range(count):
        names = rng.sample(sorted(TOOLS), len(TOOLS))
        chosen = rng.sample(names, rng.choice((1, 1, 1, 2)))
        calls = [{"name": name, "arguments": json.dumps({key: _words(rng) for key in TOOLS[name]})} for name in chosen]
        stamp = f"20{rng.randint(24, 27)}-{rng.randint(1, 12):02}-{rng.randint(1, 28):02}T{rng.randint(0, 23):02}:15:00"
        out.append(
            {
                "metadata": "eval" if n % 10 == 0 else "train",
                "tools": [{"function": _declaration(name)} for name in names],
                "messages": [
                    {"role": "developer", "content": f"Current date and time: {stamp}\nUse these functions\n"},
                    {"role": "user", "content": f"Row {n}: {_words(rng, 12)}, please: {_words(rng, 20)}."},
                    {
                        "role": "assistant",
                        "tool_calls": [{"id": f"c{i}", "type": "function", "function": c} for i, c in enumerate(calls)],
                    },
                ],
            }
        )
    return out


def _words(rng: random.Random, count: int = 5) -> str:
    return " ".join(rng.choices(WORDS, k=count))


def _declaration(name: str) -> dict[str, Any]:
    properties = {key: {"type": "STRING", "description": text} for key, text in TOOLS[name].items()}
    parameters = {"type": "OBJECT", "properties": properties, "required": list(properties)[:2]}
    return {
        "name": name,
        "description": f"{name.replace('_', ' ').capitalize()} on the phone.",
        "parameters": parameters,
    }


def measure(contender: str, path: Path) -> dict[str, Any]:
    """Seconds from the file to ids and masks, in this process, and the first row's ids."""
    if contender.startswith("trl"):
        return trl(path)
    return portlab(contender.split()[1], path)


def tokenizer_for(name: str) -> Tokenizer:
    """The real tokenizer under the format's names."""
    tokenizer = Tokenizer.load(default_model().path)
    return tokenizer.renamed(GEMMA4_TOKENS) if name == "gemma4" else tokenizer


def portlab(name: str, path: Path) -> dict[str, Any]:
    """Import, check, render, encode and mask."""
    from portlab_spec.data.rows import import_rows
    from portlab_spec.data.tokens import tokenize

    fmt, tokenizer = find_format(name), tokenizer_for(name)
    start = time.perf_counter()
    imported = import_rows(path)
    middle = time.perf_counter()
    prepared = tokenize(imported.conversations, fmt, tokenizer, 4096)
    end = time.perf_counter()
    if imported.rejects:
        raise SystemExit(f"bench_spec: {imported.rejects[0].reason}")
    return {
        "rows": len(prepared),
        "seconds": end - start,
        "seconds_import": middle - start,
        "seconds_render_and_encode": end - middle,
        "tokens": sum(len(row.ids) for row in prepared),
        "supervised_tokens": sum(sum(row.loss) for row in prepared),
        "first_ids": list(prepared[0].ids),
    }


def trl(path: Path) -> dict[str, Any]:
    """What SFTTrainer does with a data set before the first step."""
    import torch
    import transformers
    from datasets import Dataset, Features, Json, List
    from trl import SFTConfig, SFTTrainer

    torch.set_num_threads(1)
    backend = tokenizer_for("gemma4").backend
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<bos>", eos_token="<turn|>", pad_token="<pad>"
    )
    template = Path(sys.modules["trl"].__path__[0]) / "chat_templates" / "gemma4_v5.jinja"
    tokenizer.chat_template = template.read_text(encoding="utf-8")
    config = transformers.Gemma3TextConfig(
        vocab_size=len(tokenizer), hidden_size=8, intermediate_size=8, num_hidden_layers=1,
        num_attention_heads=1, num_key_value_heads=1, head_dim=8,
    )  # fmt: skip

    def prepare(lines: list[str]) -> tuple[float, Any]:
        model = transformers.Gemma3ForCausalLM(config)
        with tempfile.TemporaryDirectory() as folder:
            args = SFTConfig(
                folder, max_length=None, completion_only_loss=True, bf16=False, use_cpu=True, report_to=[],
                disable_tqdm=True, shuffle_dataset=False,
            )  # fmt: skip
            start = time.perf_counter()
            records = [json.loads(line) for line in lines]
            for call in (call for row in records for call in row["messages"][2]["tool_calls"]):
                call["function"]["arguments"] = json.loads(call["function"]["arguments"])
            # As JSON: Arrow's structs would give every call the arguments of all others, as nulls.
            columns = {
                "prompt": [row["messages"][:2] for row in records],
                "completion": [row["messages"][2:] for row in records],
                "tools": [row["tools"] for row in records],
            }
            data = Dataset.from_dict(columns, features=Features({name: List(Json()) for name in columns}))
            trainer = SFTTrainer(model, args=args, train_dataset=data, processing_class=tokenizer)
            return time.perf_counter() - start, trainer.train_dataset

    lines = path.read_text(encoding="utf-8").splitlines()
    small, _ = prepare(lines[:16])
    seconds, prepared = prepare(lines)
    return {
        "rows": len(prepared),
        "seconds": seconds - small,
        "tokens": sum(map(len, prepared["input_ids"])),
        "supervised_tokens": sum(label != -100 for labels in prepared["labels"] for label in labels),
        "first_ids": list(prepared[0]["input_ids"]),
    }


def main() -> None:
    """Measure every contender in a process of its own and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--contender", choices=CONTENDERS)
    parser.add_argument("--file", type=Path)
    args = parser.parse_args()
    if args.contender:
        figures = measure(args.contender, args.file)
        figures["peak_rss_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        print(json.dumps(figures))
        return
    default_model()  # prepared outside the time that is measured
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows(args.rows)), encoding="utf-8")
        size = path.stat().st_size
        figures = {name: _in_a_process(name, path, folder) for name in CONTENDERS}
    first = {name: figure.pop("first_ids") for name, figure in figures.items()}
    if first["portlab gemma4"] != first["trl gemma4"]:
        raise SystemExit("bench_spec: the two sides do not produce the same ids")
    for figure in figures.values():
        figure["rows_per_minute"] = 60 * figure["rows"] / figure["seconds"]
    per_minute = {name: figure["rows_per_minute"] for name, figure in figures.items()}
    ratios = {f"{name} / trl gemma4": per_minute[name] / per_minute["trl gemma4"] for name in CONTENDERS[:2]}
    packages = ("portlab-spec", "tokenizers", "trl", "transformers", "datasets", "pyarrow", "pydantic")
    path = write_result("bench_spec", packages, figures, ratios, file_bytes=size)
    print("| contender | rows / minute | seconds | tokens / row | learnt / row | peak memory, GiB |")
    print("|---|---:|---:|---:|---:|---:|")
    for name, f in figures.items():
        print(
            f"| {name} | {f['rows_per_minute']:,.0f} | {f['seconds']:.1f} | {f['tokens'] / f['rows']:.0f} "
            f"| {f['supervised_tokens'] / f['rows']:.1f} | {f['peak_rss_bytes'] / 2**30:.2f} |"
        )
    print(f"\n{', '.join(f'{name}: {ratio:.1f}x' for name, ratio in ratios.items())}; written to {path.name}")


def _in_a_process(contender: str, path: Path, folder: str) -> dict[str, Any]:
    # One core each; TRL's caches of prepared data go with the folder, so that nothing is measured from a cache.
    env = os.environ | {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1", "HF_HOME": f"{folder}/hf"}
    command = [sys.executable, __file__, "--contender", contender, "--file", str(path)]
    print(f"{contender} ...", file=sys.stderr, flush=True)
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=env, check=False)
    if done.returncode:
        raise SystemExit(f"bench_spec: {contender} could not run (exit code {done.returncode})")
    return dict(json.loads(done.stdout.splitlines()[-1]))


if __name__ == "__main__":
    main()
