"""When to send: Poisson, constant or as a trace has it. Same seed, same times."""

import math
from pathlib import Path
from typing import Literal

import numpy as np

from portlab_spec.errors import UserError

Arrivals = Literal["poisson", "constant"]


def schedule(arrivals: Arrivals, rate: float, seconds: float, seed: int) -> np.ndarray:
    """Times of sending, float64, seconds from the start, within [0, seconds).

    The gaps of a Poisson process are left as they are drawn: rescaling them so that the last request falls on the end,
    as some tools do, makes a burst at the end impossible.

    Raises:
        UserError: a rate or a duration that is not positive and finite.
    """
    if not (0 < rate < math.inf and 0 < seconds < math.inf):
        raise UserError(f"a load of {rate:g} requests/s for {seconds:g} s is none", fix="Give positive numbers")
    if arrivals == "constant":
        return np.arange(math.ceil(rate * seconds)) / rate
    rng = np.random.default_rng(seed)
    expected = rate * seconds
    gaps = rng.exponential(1 / rate, int(expected + 10 * math.sqrt(expected) + 20))
    times = np.cumsum(gaps)
    return times[times < seconds]


def read_trace(path: Path) -> np.ndarray:
    """Times of a trace: one number of seconds per line, not falling; empty lines and `#` comments do not count.

    Raises:
        UserError: no such file, no times, a line that is no time, or one before the last.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot be read ({error})", where=str(path), fix="Give a file of times, one a line") from None
    times: list[float] = []
    for number, line in enumerate(lines, start=1):
        text = line.partition("#")[0].strip()
        if not text:
            continue
        where = f"{path}, line {number}"
        try:
            time = float(text)
        except ValueError:
            raise UserError(f"{text!r} is no time", where=where, fix="Write seconds, one number a line") from None
        if not math.isfinite(time) or time < 0 or (times and time < times[-1]):
            raise UserError(f"{text} is before the last or no time", where=where, fix="Sort the trace")
        times.append(time)
    if not times:
        raise UserError("has no times", where=str(path), fix="Write seconds, one number a line")
    return np.array(times)
