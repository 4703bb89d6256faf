"""The last check: the merged model computes what base plus adapter computes, and what the trainer computed.

The one module here that needs torch and transformers, the extra `logits`. All in f32 on the CPU: room for one model in
f32 is needed. The reference is the base with its updates added in float64 by torch; none of the merge's code is used.
"""

import gc
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from portlab_merge.peft_format import module_path
from portlab_merge.plan import Plan
from portlab_spec.errors import UserError

# Mean divergence in nats up to which two models count as the same; MaxText's checker of converted checkpoints uses it.
MAX_KL = 0.015
RANDOM_TOKENS = 64
MAX_NEW_TOKENS = 48


@dataclass(frozen=True)
class Agreement:
    """How a model's logits agree with reference ones.

    Attributes:
        positions: compared.
        largest: greatest difference of a logit.
        kl: mean divergence, nats.
        first_choice: share of positions with the same most likely token.
    """

    positions: int
    largest: float
    kl: float
    first_choice: float


@dataclass(frozen=True)
class LogitReport:
    """What `verify --logits` found.

    Attributes:
        base: the base against base plus adapter: what the adapter does.
        merged: the merged model against base plus adapter.
        golden: base plus adapter against the trainer's own logits, if the checkpoint has them.
        greedy: tokens in which the greedy answers of merged model and base plus adapter agree from the start, and the
            length of the latter's; the prompt is that of the checkpoint's probe, a call of a tool as a rule.
    """

    base: Agreement
    merged: Agreement
    golden: Agreement | None
    greedy: tuple[int, int] | None

    def faults(self) -> list[str]:
        """One line for each disagreement that rounding does not explain."""
        lines = []
        if self.golden and self.golden.kl > MAX_KL:
            lines.append(f"base + adapter is not what was trained: {self.golden.kl:.3g} nats from the trainer's logits")
        if self.merged.kl > MAX_KL:
            lines.append(f"the merged model is {self.merged.kl:.3g} nats from base + adapter")
        if self.merged.kl >= self.base.kl > 0:
            lines.append("the merged model is no nearer to base + adapter than the base is")
        return lines


def compare_logits(plan: Plan, merged: Path) -> LogitReport:
    """Run the base, the base plus adapter, and the merged model.

    Args:
        plan: base and adapter.
        merged: folder that merge wrote.

    Raises:
        UserError: transformers does not know the architecture.
    """
    probe = plan.checkpoint.adapter.record.get("probe") or {}
    ids = probe.get("token_ids") or _random_ids(plan)
    positions = probe.get("positions") or list(range(len(ids)))
    prompt = ids[: positions[0] + 1] if probe else None
    model = _load(plan.base.folder)
    base = _logits(model, ids)
    _add_updates(model, plan)
    reference = _logits(model, ids)
    answer = _greedy(model, prompt) if prompt else None
    del model
    gc.collect()
    model = _load(merged)
    found = _logits(model, ids)
    greedy = (_common(answer, _greedy(model, prompt)), len(answer)) if prompt and answer else None
    return LogitReport(
        base=_agreement(base[positions], reference[positions]),
        merged=_agreement(found[positions], reference[positions]),
        golden=_golden(reference[positions], probe) if probe else None,
        greedy=greedy,
    )


def _load(folder: Path) -> Any:
    architecture = (json.loads((folder / "config.json").read_text(encoding="utf-8")).get("architectures") or [""])[0]
    kind = getattr(transformers, architecture, None)
    if kind is None:
        fix = "Install a newer transformers"
        raise UserError(f"transformers has no {architecture or 'architecture'}", where=str(folder), fix=fix)
    return kind.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


def _random_ids(plan: Plan) -> list[int]:
    embedding = next(t for name, (_, t) in plan.base.tensors.items() if name.endswith("embed_tokens.weight"))
    # Foreign checkpoints have no probe; any tokens show whether two models are the same.
    return np.random.default_rng(0).integers(0, embedding.shape[0], RANDOM_TOKENS).tolist()


def _add_updates(model: Any, plan: Plan) -> None:
    with torch.no_grad():
        for target in plan.targets:
            a, b = (torch.from_numpy(np.ascontiguousarray(factor)).double() for factor in plan.factors(target))
            weight = _parameter(model, target.tensor)
            weight.copy_(weight.double() + target.scaling * (a @ b).mT)
        if plan.rows:
            values = torch.from_numpy(np.ascontiguousarray(plan.token_rows()))
            _parameter(model, plan.rows.tensor)[list(plan.rows.ids)] = values


def _parameter(model: Any, tensor: str) -> Any:
    path = module_path(tensor)
    return model.get_parameter(f"{path}.weight" if tensor.endswith(".weight") else path)


def _logits(model: Any, ids: Sequence[int]) -> np.ndarray:
    with torch.no_grad():
        return model(input_ids=torch.tensor([list(ids)])).logits[0].double().numpy()


def _greedy(model: Any, prompt: Sequence[int]) -> list[int]:
    with torch.no_grad():
        tokens = torch.tensor([list(prompt)])
        answer = model.generate(
            input_ids=tokens,
            attention_mask=torch.ones_like(tokens),
            max_new_tokens=MAX_NEW_TOKENS,
            do_sample=False,
            top_k=None,
            top_p=None,
        )
    return answer[0, len(prompt) :].tolist()


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """Length of the common start."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _agreement(found: np.ndarray, reference: np.ndarray) -> Agreement:
    log_p, log_q = _log_softmax(reference), _log_softmax(found)
    return Agreement(
        positions=len(reference),
        largest=float(np.abs(found - reference).max()),
        kl=float((np.exp(log_p) * (log_p - log_q)).sum(-1).mean()),
        first_choice=float((found.argmax(-1) == reference.argmax(-1)).mean()),
    )


def _golden(reference: np.ndarray, probe: Mapping[str, Any]) -> Agreement:
    """Over the tokens of which the trainer kept the logits."""
    ids = np.array(probe["topk_ids"])
    return _agreement(np.take_along_axis(reference, ids, -1), np.array(probe["topk_logits"], np.float64))


def _log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
