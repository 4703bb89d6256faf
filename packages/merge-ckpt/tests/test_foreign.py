"""Checkpoints that other trainers wrote, with the logits that their own models compute: `bench/foreign/make_*.py`.

Runs on the cases in the folder that PORTLAB_FOREIGN names; each is made by an interpreter that has the trainer.
"""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from portlab_merge.base_model import open_base
from portlab_merge.checkpoint import read_checkpoint
from portlab_merge.overlay import MergeOptions, merge
from portlab_merge.peft_adapter import export_adapter
from portlab_merge.plan import Plan, make_plan
from portlab_merge.sources import Given
from portlab_merge.verify import verify_adapter, verify_merged

FOLDER = os.environ.get("PORTLAB_FOREIGN", "")
CASES = sorted(path.parent for path in Path(FOLDER).glob("*/case.json")) if FOLDER else []
CLOSE = 1e-4  # logits of a few units, in f32 on both sides

pytestmark = pytest.mark.skipif(not FOLDER, reason="PORTLAB_FOREIGN names no folder of cases")


@dataclass(frozen=True)
class Case:
    """A case and the plan of its merge."""

    folder: Path
    settings: dict[str, Any]
    plan: Plan

    @property
    def base(self) -> Path:
        return self.folder / "base"


@pytest.fixture(scope="module", params=CASES, ids=lambda folder: folder.name)
def case(request: pytest.FixtureRequest) -> Case:
    folder = request.param
    settings = json.loads((folder / "case.json").read_text())
    given = Given(alpha=settings["alpha"] if settings.get("pass_alpha") else None)
    return Case(folder, settings, make_plan(open_base(folder / "base"), read_checkpoint(folder / "run", given=given)))


def model(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


def error(case: Case, model: Any) -> float:
    """Largest distance between a model's logits and those of the trainer's own model."""
    tokens = torch.tensor(json.loads((case.folder / "tokens.json").read_text()))
    with torch.no_grad():
        logits = model(input_ids=tokens).logits.numpy()
    return float(np.abs(logits - np.load(case.folder / "logits.npy")).max())


def test_there_is_a_case() -> None:
    assert CASES


def test_rank_and_alpha_are_the_trainers(case: Case) -> None:
    lora = case.plan.checkpoint.adapter.lora
    assert (lora.rank, lora.alpha) == (case.settings["rank"], case.settings["alpha"])


def test_the_base_alone_gives_other_logits(case: Case) -> None:
    assert error(case, model(case.base)) > 0.1


def test_the_merged_model_gives_the_trainers_logits(case: Case, tmp_path: Path) -> None:
    out = tmp_path / "merged"
    merge(case.plan, out, MergeOptions())
    assert verify_merged(case.plan, out) == []
    distance = error(case, model(out))
    print(f"{case.folder.name}: merged within {distance:.1e}")
    assert distance < CLOSE


def test_the_exported_adapter_gives_the_trainers_logits(case: Case, tmp_path: Path) -> None:
    out = tmp_path / "adapter"
    export_adapter(case.plan, out)
    assert verify_adapter(case.plan, out) == []
    distance = error(case, PeftModel.from_pretrained(model(case.base), out))
    print(f"{case.folder.name}: adapter within {distance:.1e}")
    assert distance < CLOSE
