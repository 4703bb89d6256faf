"""Configurations that Google published, for planning without a download.

Each file holds the keys of the model's `config.json` on the Hub that decide the text model, as `GemmaConfig` reads
them. A base model and its instruction-tuned form share one. Checked in November 2026 against
github.com/AI-Hypercomputer/maxtext (src/maxtext/configs/models/gemma{3,4}-*.yml), the configurations of google-tunix
0.1.7, and, by the parameters they give, the model cards and the Gemma 3 report (arXiv 2503.19786, table 1).
"""

import json
import re
from importlib import resources
from typing import Any

from portlab_spec.models.config import GemmaConfig

_FUNCTION_GEMMA = "functiongemma-270m"  # Gemma 3 270M, trained further
_NAMES = (
    "gemma-3-270m",
    _FUNCTION_GEMMA,
    "gemma-3-1b",
    "gemma-3-4b",
    "gemma-3-12b",
    "gemma-3-27b",
    "gemma-4-E2B",
    "gemma-4-E4B",
    "gemma-4-12B",
    "gemma-4-26B-A4B",
    "gemma-4-31B",
)


def published_models() -> list[str]:
    """Hugging Face ids of the instruction-tuned models with a configuration here, by family and size."""
    return [f"google/{name}-it" for name in _NAMES]


def published_config(model_id: str) -> GemmaConfig | None:
    """The configuration of a published model; None for any other.

    Args:
        model_id: Hugging Face id in any case, with or without `google/` and `-it` or `-pt`.
    """
    raw = published_json(model_id)
    return None if raw is None else GemmaConfig.from_dict(raw, where=f"published {model_id}")


def published_json(model_id: str) -> dict[str, Any] | None:
    """As `published_config`: what of its `config.json` ships here, parsed."""
    wanted = re.sub(r"^google/|-(it|pt)$", "", model_id.strip().lower())
    name = next((name for name in _NAMES if name.lower() == wanted), None)
    if name is None:
        return None
    file = resources.files(__name__) / f"{'gemma-3-270m' if name == _FUNCTION_GEMMA else name}.json"
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return found
