"""`vllm bench serve`, with the processor time that it spends while requests run: FILE, then its own options.

Its command line cannot be asked for help in the CPU build, whose distribution has another name; this calls the same
function. The time is that of its `benchmark` less that of its own metrics, which it calculates within.
"""

import argparse
import json
import sys
import time
from typing import Any

from vllm.benchmarks import serve

spent = {"benchmark": 0.0, "metrics": 0.0}
run, calculate = serve.benchmark, serve.calculate_metrics


async def timed_benchmark(*args: Any, **options: Any) -> Any:
    """The whole of the measurement."""
    began = time.process_time()
    try:
        return await run(*args, **options)
    finally:
        spent["benchmark"] += time.process_time() - began


def timed_metrics(*args: Any, **options: Any) -> Any:
    """What it makes of the requests."""
    began = time.process_time()
    try:
        return calculate(*args, **options)
    finally:
        spent["metrics"] += time.process_time() - began


serve.benchmark, serve.calculate_metrics = timed_benchmark, timed_metrics
parser = argparse.ArgumentParser()
serve.add_cli_args(parser)
serve.main(parser.parse_args(sys.argv[2:]))
with open(sys.argv[1], "w") as stream:
    json.dump(spent, stream)
