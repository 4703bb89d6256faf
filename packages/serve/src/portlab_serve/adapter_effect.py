"""Does an adapter change anything on the running server? One greedy request to the base and one to each adapter.

vLLM has loaded adapters and served the base (vllm#41754, byte-identical at temperature 0), so it is asked.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from portlab_spec.errors import CheckFailed, UserError

_PROMPT = "What should I do next? List the steps:"
_TOKENS, _TOP = 8, 5


@dataclass(frozen=True)
class Effect:
    """How far an adapter moves log probabilities, in nats, and how far the base's own differ between two requests."""

    adapter: str
    difference: float
    noise: float

    @property
    def is_seen(self) -> bool:
        """Is it more than noise?"""
        return self.difference > self.noise


def wait_until_healthy(client: httpx.Client, alive: Callable[[], bool], interval: float = 1.0) -> bool:
    """Poll /health; False if the server ended first."""
    while alive():
        try:
            if client.get("/health").status_code == 200:
                return True
        except httpx.TransportError:
            pass
        time.sleep(interval)
    return False


def measure(client: httpx.Client, base: str, adapters: Sequence[str]) -> list[Effect]:
    """The effect of each adapter.

    Raises:
        UserError: the server refuses a request.
    """
    first, second = (_ask(client, base) for _ in range(2))
    noise = _distance(first, second)
    return [Effect(adapter, _distance(first, _ask(client, adapter)), noise) for adapter in adapters]


def require_effect(effects: Sequence[Effect]) -> None:
    """Refuse adapters without effect.

    Raises:
        CheckFailed: names the first.
    """
    for effect in effects:
        if not effect.is_seen:
            raise CheckFailed(
                f"adapter {effect.adapter} changes nothing: its log probabilities differ from the base's by "
                f"{effect.difference:.2g}, two answers of the base by {effect.noise:.2g}",
                fix="Serve the merged model: merge-ckpt merge",
            )


def _ask(client: httpx.Client, model: str) -> list[tuple[str, dict[str, float]]]:
    """Greedy tokens, each with the likeliest ones in its place."""
    body = {"model": model, "prompt": _PROMPT, "max_tokens": _TOKENS, "temperature": 0, "logprobs": _TOP}
    answer = client.post("/v1/completions", json=body)
    if answer.status_code != 200:
        raise UserError(
            f"answers {answer.status_code}: {answer.text[:200]}", where=f"/v1/completions of {model}", fix="See its log"
        )
    held: dict[str, Any] = answer.json()["choices"][0]["logprobs"]
    return list(zip(held["tokens"], held["top_logprobs"], strict=True))


def _distance(a: list[tuple[str, dict[str, float]]], b: list[tuple[str, dict[str, float]]]) -> float:
    """Largest difference of a token's log probability, over the places with the same tokens before them."""
    largest = 0.0
    for (token, here), (other, there) in zip(a, b, strict=False):
        shared = here.keys() & there.keys()
        largest = max([largest, *(abs(here[t] - there[t]) for t in shared)]) if shared else math.inf
        if token != other:
            break
    return largest
