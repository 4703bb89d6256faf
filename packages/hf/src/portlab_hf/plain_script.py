"""The plainest training that transformers, PEFT and PyTorch offer, in the five functions by which `portlab-parity`
runs a script. Copy this file, and put your own script's lines into the functions.

`recipe` is the comparison's recipe (`portlab_spec.recipe.Recipe`); a row has `ids`, `supervised` (a flag for each id)
and `text`. Take `ids`, or tokenise `text` as your script does: the comparison begins with the tokens.
"""

from typing import Any

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

# True leaves the adapter as `load` made it; otherwise it is given the values that the other backend starts from.
KEEP_ADAPTER = False


def load(model: str, recipe: Any) -> tuple[Any, Any]:
    """The model, with the adapter in it and in the mode that it trains in, and the tokenizer that `batch` is given."""
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager")
    return PeftModel.from_pretrained(base, recipe.lora.start_from, is_trainable=True).train(), None


def batch(rows: list[Any], tokenizer: Any) -> dict[str, torch.Tensor]:
    """A row each of `input_ids`, `attention_mask` and `labels`, -100 where nothing is to be learnt."""
    width = max(len(row.ids) for row in rows)
    found = {name: torch.zeros(len(rows), width, dtype=torch.int64) for name in ("input_ids", "attention_mask")}
    found["labels"] = torch.full((len(rows), width), -100)
    for number, row in enumerate(rows):
        ids, held = torch.tensor(row.ids), torch.tensor(row.supervised)
        found["input_ids"][number, : len(ids)] = ids
        found["attention_mask"][number, : len(ids)] = 1
        found["labels"][number, : len(ids)] = torch.where(held, ids, -100)
    return found


def loss(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """The number whose gradient is taken."""
    targets = batch["labels"][:, 1:]
    # Logits of the columns that predict something: all of them would be the largest tensor by far.
    columns = (targets != -100).any(0).nonzero().squeeze(-1)
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    logits = model(**inputs, logits_to_keep=columns, use_cache=False).logits.float()
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets[:, columns].flatten(), ignore_index=-100)


def optimizer(model: Any, recipe: Any) -> tuple[Any, Any]:
    """The optimiser, and its schedule or None."""
    from portlab_spec.schedule import learning_rates

    settings, rates = recipe.optimizer, learning_rates(recipe.optimizer, recipe.steps)
    adamw = torch.optim.AdamW(
        [parameter for parameter in model.parameters() if parameter.requires_grad],
        lr=1.0,
        betas=(settings.b1, settings.b2),
        eps=settings.eps,
        weight_decay=settings.weight_decay,
    )
    return adamw, torch.optim.lr_scheduler.LambdaLR(adamw, lambda step: float(rates[min(step, len(rates) - 1)]))


def clip(model: Any, recipe: Any) -> torch.Tensor:
    """Clip the gradients; their norm before."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.nn.utils.clip_grad_norm_(trained, recipe.optimizer.clip_norm)
