"""Run observations and print each as one line of JSON, so that a crash later on loses none of the earlier ones."""

import json
import sys
import time
from collections.abc import Callable
from typing import Any

Observation = Callable[[], dict[str, Any]]


def observe(*observations: Observation) -> None:
    """Print `{"name":, "seen":}` for each; what was raised is part of what was seen: `{"raised":, "says":}`."""
    for observation in observations:
        start = time.monotonic()
        try:
            seen = observation()
        except Exception as error:  # whatever the stock code raises is the observation
            seen = {"raised": type(error).__name__, "says": str(error)}
        print(json.dumps({"name": observation.__name__, "seen": seen}), flush=True)
        print(f"{observation.__name__}: {time.monotonic() - start:.1f} s", file=sys.stderr)
