"""What a server says of itself: its models, its version, its counters."""

import re
from dataclasses import dataclass
from typing import Any

import httpx

from portlab_spec.errors import UserError

_LINE = re.compile(r"^(?P<name>[a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(?P<labels>[^}]*)\})?\s+(?P<value>[^\s]+)", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
# Sums over engines and models.
COUNTERS = {
    "prefix_queries": "vllm:prefix_cache_queries_total",
    "prefix_hits": "vllm:prefix_cache_hits_total",
    "preemptions": "vllm:num_preemptions_total",
    "prompt_tokens": "vllm:prompt_tokens_total",
    "output_tokens": "vllm:generation_tokens_total",
}
_CACHE_CONFIG = "vllm:cache_config_info"


@dataclass(frozen=True)
class Counters:
    """Counters of `/metrics` at one moment; those that the server lacks are absent."""

    values: dict[str, float]

    def since(self, before: "Counters") -> dict[str, float]:
        """What was added."""
        return {name: value - before.values[name] for name, value in self.values.items() if name in before.values}


def parse_metrics(text: str) -> tuple[Counters, dict[str, str]]:
    """Counters, and the settings of the cache, of Prometheus's text format."""
    sums: dict[str, float] = {}
    settings: dict[str, str] = {}
    wanted = {name: key for key, name in COUNTERS.items()}
    for line in _LINE.finditer(text):
        name = line["name"]
        if name in wanted:
            sums[wanted[name]] = sums.get(wanted[name], 0.0) + float(line["value"])
        elif name == _CACHE_CONFIG:
            settings |= dict(_LABEL.findall(line["labels"] or ""))
    return Counters(sums), settings


class Server:
    """A server under test, beside the requests of the load.

    Args:
        url: as the user gave it.
        headers: for every request, such as the key.
    """

    def __init__(self, url: str, headers: dict[str, str]) -> None:
        root = url.rstrip("/").removesuffix("/chat/completions").removesuffix("/v1")
        self.root = root
        self._client = httpx.Client(base_url=root, headers=headers, timeout=30)

    def models(self) -> list[str]:
        """Names that it serves.

        Raises:
            UserError: nobody answers, or no list of models comes back.
        """
        try:
            response = self._client.get("/v1/models")
            response.raise_for_status()
            return [str(model["id"]) for model in response.json()["data"]]
        except httpx.HTTPError as error:
            raise UserError(
                f"gives no list of models ({error})", where=self.root, fix="Start the server, or check --url"
            ) from None
        except (ValueError, KeyError, TypeError):
            raise UserError("its list of models is none", where=self.root, fix="Check --url") from None

    def choose_model(self, asked: str | None) -> str:
        """The model to ask: the one that was asked for, or the only one."""
        names = self.models()
        if asked is None and len(names) == 1:
            return names[0]
        if asked not in names:
            what = f"serves no {asked}" if asked else f"serves {len(names)} models"
            raise UserError(what, where=self.root, fix=f"Pass --model, one of {', '.join(names)}")
        return asked

    def describe(self) -> dict[str, Any]:
        """Version and cache settings, where it has them."""
        found: dict[str, Any] = {}
        version = self._get("/version")
        if version is not None:
            try:
                found["version"] = version.json().get("version")
            except ValueError:
                found["version"] = version.text[:40]
        metrics = self._get("/metrics")
        if metrics is not None and (settings := parse_metrics(metrics.text)[1]):
            found["cache"] = settings
        return found

    def counters(self) -> Counters | None:
        """Counters now; None where there is no /metrics."""
        response = self._get("/metrics")
        return None if response is None else parse_metrics(response.text)[0]

    def _get(self, path: str) -> httpx.Response | None:
        try:
            response = self._client.get(path)
        except httpx.HTTPError:
            return None
        return response if response.status_code == 200 else None
