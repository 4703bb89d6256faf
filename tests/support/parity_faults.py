"""Training scripts in plain PyTorch, each with one mistake: what `portlab-parity` has to find and to name.

`SCRIPTS` maps a name to a function that makes the script, and the name of the cause that has to be found. A mistake
changes what is computed, as it would in somebody's script; nothing here touches the evidence.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from portlab_hf import plain_script
from portlab_hf.model import base_of, decoder_layers, text_model


def script(**functions: Any) -> SimpleNamespace:
    """The plain script with some functions replaced."""
    names = ("load", "batch", "loss", "optimizer", "clip", "KEEP_ADAPTER")
    return SimpleNamespace(**{name: getattr(plain_script, name) for name in names} | functions)


def on_model(change: Callable[[Any], Any], **functions: Any) -> SimpleNamespace:
    """The plain script whose model is changed after loading."""

    def load(model: str, recipe: Any) -> tuple[Any, Any]:
        loaded, tokenizer = plain_script.load(model, recipe)
        change(loaded)
        return loaded, tokenizer

    return script(load=load, **functions)


# --- tokens


def double_bos() -> SimpleNamespace:
    def batch(rows: list[Any], tokenizer: Any) -> dict[str, torch.Tensor]:
        for row in rows:
            row.ids.insert(0, 2)
            row.supervised.insert(0, False)
        return plain_script.batch(rows, tokenizer)

    return script(batch=batch)


def left_padded(rows: list[Any], tokenizer: Any) -> dict[str, torch.Tensor]:
    right = plain_script.batch(rows, tokenizer)
    lengths = right["attention_mask"].sum(1)
    width = right["input_ids"].shape[1]
    return {
        name: torch.stack([row.roll(width - int(length)) for row, length in zip(x, lengths, strict=True)])
        for name, x in right.items()
    }


def loss_of(model: Any, batch: dict[str, torch.Tensor], mask: Any) -> torch.Tensor:
    logits = model(input_ids=batch["input_ids"], attention_mask=mask, use_cache=False).logits[:, :-1]
    return cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten(), ignore_index=-100)


def padding_seen() -> SimpleNamespace:
    return script(batch=left_padded, loss=lambda model, batch: loss_of(model, batch, None))


def padding_as_tokens() -> SimpleNamespace:
    def batch(rows: list[Any], tokenizer: Any) -> dict[str, torch.Tensor]:
        found = plain_script.batch(rows, tokenizer)
        del found["attention_mask"]
        return found

    return script(batch=batch, loss=lambda model, batch: loss_of(model, batch, None))


def labels_shifted() -> SimpleNamespace:
    def batch(rows: list[Any], tokenizer: Any) -> dict[str, torch.Tensor]:
        found = plain_script.batch(rows, tokenizer)
        found["labels"] = torch.cat([found["labels"][:, 1:], torch.full((len(rows), 1), -100)], 1)
        return found

    return script(batch=batch)


def prompt_supervised() -> SimpleNamespace:
    def batch(rows: list[Any], tokenizer: Any) -> dict[str, torch.Tensor]:
        found = plain_script.batch(rows, tokenizer)
        found["labels"] = torch.where(found["attention_mask"].bool(), found["input_ids"], -100)
        return found

    return script(batch=batch)


def own_adapter() -> SimpleNamespace:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    def load(model: str, recipe: Any) -> tuple[Any, Any]:
        base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager")
        lora = recipe.lora
        config = LoraConfig(
            task_type="CAUSAL_LM", r=lora.rank, lora_alpha=lora.alpha, target_modules=list(lora.targets)
        )
        return get_peft_model(base, config).train(), None

    return script(load=load, KEEP_ADAPTER=True)


# --- the model


def dropout(model: Any) -> None:
    for module in model.modules():
        if hasattr(module, "lora_dropout"):
            module.lora_dropout["default"] = nn.Dropout(0.1)


def unscaled_embedding(model: Any) -> None:
    text_model(base_of(model)).embed_tokens.embed_scale.fill_(1.0)


def plain_norms(model: Any) -> None:
    for name, module in model.named_modules():
        if name.endswith("norm") and getattr(module, "weight", None) is not None:
            module.weight.data -= 1.0  # 1 + w becomes w


def rslora(model: Any) -> None:
    for module in model.modules():
        if hasattr(module, "scaling") and isinstance(module.scaling, dict):
            module.scaling["default"] = module.lora_alpha["default"] / module.r["default"] ** 0.5


def query_scale(model: Any) -> None:
    for layer in decoder_layers(base_of(model)):
        layer.self_attn.scaling = 1.0 / layer.self_attn.head_dim


def one_rope(model: Any) -> None:
    rotary = text_model(base_of(model)).rotary_emb
    rotary.full_attention_inv_freq.copy_(rotary.sliding_attention_inv_freq)


def no_window(model: Any) -> None:
    base_of(model).config.sliding_window = 10_000


def wide_mask() -> SimpleNamespace:
    def loss(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        rows, width = batch["input_ids"].shape
        everything = torch.zeros(rows, 1, width, width)
        hidden = torch.where(batch["attention_mask"].bool(), 0.0, torch.finfo(torch.float32).min)
        mask = everything + hidden[:, None, None, :]
        return loss_of(model, batch, {"full_attention": mask, "sliding_attention": mask})

    return script(loss=loss)


def capped(bound: float | None) -> Callable[[Any], None]:
    def change(model: Any) -> None:
        base_of(model).config.final_logit_softcapping = bound

    return change


def other_head(model: Any) -> None:
    head = base_of(model).lm_head
    head.weight = nn.Parameter(head.weight * 0.9 + 0.1 * torch.randn_like(head.weight), requires_grad=False)


def unknown(model: Any) -> None:
    decoder_layers(base_of(model))[2].mlp.gate_proj.weight.data *= 1.01


def frozen(model: Any) -> None:
    for name, parameter in model.named_parameters():
        if "k_proj.lora" in name:
            parameter.register_hook(torch.zeros_like)


# --- the loss


def token_losses(model: Any, batch: dict[str, torch.Tensor], shift: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], use_cache=False).logits
    logits, labels = logits[:, : logits.shape[1] - shift], batch["labels"][:, shift:]
    losses = cross_entropy(logits.transpose(1, 2), labels, ignore_index=-100, reduction="none")
    return losses, labels != -100


def with_loss(reduce: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], shift: int = 1) -> SimpleNamespace:
    return script(loss=lambda model, batch: reduce(*token_losses(model, batch, shift)))


def small_gradients(model: Any) -> None:
    for parameter in trained(model):
        parameter.register_hook(lambda gradient: gradient / 4)  # divided by the parts of a step once more


def mean(losses: torch.Tensor, held: torch.Tensor) -> torch.Tensor:
    return losses.sum() / held.sum()


def mean_of_means(losses: torch.Tensor, held: torch.Tensor) -> torch.Tensor:
    return (losses.sum(1) / held.sum(1)).mean()


# --- the optimiser


def with_optimizer(make: Callable[[list[Any], Any], Any], rate: Any = None) -> SimpleNamespace:
    def optimizer(model: Any, recipe: Any) -> tuple[Any, Any]:
        from portlab_spec.schedule import learning_rates

        found = make([parameter for parameter in model.parameters() if parameter.requires_grad], recipe.optimizer)
        rates = learning_rates(recipe.optimizer, recipe.steps)
        function = rate(rates, recipe.optimizer) if rate else (lambda step: float(rates[step]))
        return found, torch.optim.lr_scheduler.LambdaLR(found, function)

    return script(optimizer=optimizer)


def adamw(kind: Any = torch.optim.AdamW, **changes: Any) -> Callable[[list[Any], Any], Any]:
    def make(parameters: list[Any], settings: Any) -> Any:
        kept = {"betas": (settings.b1, settings.b2), "eps": settings.eps, "weight_decay": settings.weight_decay}
        return kind(parameters, lr=1.0, **kept | changes)

    return make


class Uncorrected(torch.optim.Optimizer):
    """AdamW without bias correction, as some copies of BERT's have it."""

    def __init__(self, parameters: Any, settings: Any) -> None:
        self.settings = settings
        super().__init__(parameters, {"lr": 1.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        s = self.settings
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["m"], state["v"] = torch.zeros_like(p), torch.zeros_like(p)
                state["m"].lerp_(p.grad, 1 - s.b1)
                state["v"].lerp_(p.grad.square(), 1 - s.b2)
                p.sub_(group["lr"] * (state["m"] / (state["v"].sqrt() + s.eps) + s.weight_decay * p))


def trained(model: Any) -> list[Any]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def not_clipped(model: Any, recipe: Any) -> torch.Tensor:
    return torch.nn.utils.clip_grad_norm_(trained(model), float("inf"))


def clipped_first(model: Any, recipe: Any) -> torch.Tensor:
    torch.nn.utils.clip_grad_norm_(trained(model), recipe.optimizer.clip_norm)
    return torch.nn.utils.clip_grad_norm_(trained(model), recipe.optimizer.clip_norm)


SCRIPTS: dict[str, tuple[Callable[[], SimpleNamespace], str]] = {
    "a second bos": (double_bos, "double BOS"),
    "left padding without a mask": (padding_seen, "padding side"),
    "right padding without a mask": (padding_as_tokens, "padding side"),
    "labels shifted before the model shifts them": (labels_shifted, "label shift"),
    "loss without a shift": (lambda: with_loss(mean, shift=0), "label shift"),
    "loss shifted twice": (lambda: with_loss(mean, shift=2), "label shift"),
    "labels of everything": (prompt_supervised, "prompt supervised"),
    "an adapter of its own": (own_adapter, "LoRA init"),
    "dropout": (lambda: on_model(dropout), "dropout on"),
    "embeddings not scaled": (lambda: on_model(unscaled_embedding), "embedding scale"),
    "norms times w": (lambda: on_model(plain_norms), "norm convention"),
    "alpha / sqrt(rank)": (lambda: on_model(rslora), "LoRA scale"),
    "scores by 1 / head size": (lambda: on_model(query_scale), "query scale"),
    "one RoPE for all layers": (lambda: on_model(one_rope), "RoPE base"),
    "no window": (lambda: on_model(no_window), "sliding window"),
    "no causal mask": (wide_mask, "causal mask"),
    "a softcap of 30": (lambda: on_model(capped(30.0)), "softcap"),
    "a head of its own": (lambda: on_model(other_head), "tied head"),
    "sum of losses": (lambda: with_loss(lambda losses, held: losses.sum()), "loss normalisation"),
    "mean of the rows' means": (lambda: with_loss(mean_of_means), "loss normalisation"),
    "sum over rows": (lambda: with_loss(lambda losses, held: losses.sum() / len(losses)), "loss normalisation"),
    "mean over all columns": (lambda: with_loss(lambda losses, held: losses.mean()), "loss normalisation"),
    "gradients divided once more": (lambda: on_model(small_gradients), "loss normalisation"),
    "no gradient for keys": (lambda: on_model(frozen), "not trained"),
    "rates of the next step": (
        lambda: with_optimizer(adamw(), lambda rates, settings: lambda step: float(rates[step + 1])),
        "schedule off by one",
    ),
    "rates of the step before": (
        lambda: with_optimizer(adamw(), lambda rates, settings: lambda step: float(rates[max(step - 1, 0)])),
        "schedule off by one",
    ),
    "warm-up from zero": (
        lambda: with_optimizer(
            adamw(),
            lambda rates, s: lambda step: s.learning_rate * min(step / s.warmup_steps, 1.0),
        ),
        "schedule off by one",
    ),
    "epsilon": (lambda: with_optimizer(adamw(eps=1e-3)), "optimiser epsilon"),
    "no bias correction": (lambda: with_optimizer(Uncorrected), "bias correction"),
    "no weight decay": (lambda: with_optimizer(adamw(weight_decay=0.0)), "weight decay"),
    "weight decay in the gradient": (lambda: with_optimizer(adamw(torch.optim.Adam)), "weight decay"),
    "PyTorch's betas": (lambda: with_optimizer(adamw(betas=(0.9, 0.999))), "optimiser betas"),
    "no clip": (lambda: script(clip=not_clipped), "gradient clip"),
    "norm after the clip": (lambda: script(clip=clipped_first), "gradient clip"),
}
