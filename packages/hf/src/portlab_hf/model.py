"""The model that is trained: transformers' Gemma, PEFT's adapter, and where every parameter lies."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from portlab_spec.assets import ModelFolder
from portlab_spec.mesh import Spec, param_spec
from portlab_spec.models import PREFIXES, AdapterLeaf, Dim, GemmaConfig, param_table
from portlab_spec.models.targets import module_regex, plan_adapter
from portlab_spec.recipe import Lora, Recipe

PEFT_PREFIX = "base_model.model."
HEAD = "lm_head.weight"
_LORA = re.compile(r"(.+)\.lora_(A|B)\.default\.weight")
_ROWS = re.compile(r"(.+)\.trainable_tokens_delta\.default")


def load_base(folder: Path, dtype: torch.dtype, *, attention: str = "sdpa") -> PreTrainedModel:
    """Read a model from safetensors onto the CPU, for causal language modelling.

    Args:
        folder: of the model.
        dtype: of its weights.
        attention: transformers' name of an implementation.
    """
    base = AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation=attention, use_safetensors=True, local_files_only=True
    )
    # A cache would be filled in training too, and Gemma's sliding one slices out of bounds on XLA.
    base.config.use_cache = False
    return base


def base_of(model: Any) -> Any:
    """transformers' model, adapter included: what PEFT put its own around, or the model itself."""
    return model.get_base_model() if isinstance(model, PeftModel) else model


def text_model(base: PreTrainedModel) -> nn.Module:
    """The decoder within: multimodal Gemmas hold it one level deeper, and ask for images' token types around it."""
    found: nn.Module = getattr(base.model, "language_model", base.model)
    return found


def decoder_layers(base: PreTrainedModel) -> list[nn.Module]:
    """The layers of the decoder, in order."""
    layers: Any = text_model(base).layers
    return list(layers)


def train_weights_of(base: PreTrainedModel) -> None:
    """Have the text model and its head trained, and nothing of what stands around it: a vision tower, say."""
    prefix = module_prefix(base)
    for name, parameter in base.named_parameters():
        parameter.requires_grad_(name.startswith(prefix) or name == HEAD)


def module_prefix(base: PreTrainedModel) -> str:
    """What the names of the text model's modules start with in this model."""
    names = {name for name, _ in base.named_modules()}
    return next(prefix for prefix in PREFIXES if f"{prefix}layers.0" in names)


def adapter_config(
    lora: Lora, leaves: Sequence[AdapterLeaf], base: PreTrainedModel, model: ModelFolder, token_ids: Sequence[int]
) -> LoraConfig:
    """PEFT's config for exactly what the recipe adapts.

    Args:
        lora: the recipe's section.
        leaves: what it adapts, by `plan_adapter`.
        base: the model that gets the adapter.
        model: where it came from.
        token_ids: rows of the embedding that are trained.
    """
    prefix = module_prefix(base)
    modules = [name for leaf in leaves if not leaf.experts for name in leaf.modules(prefix)]
    experts = [name for leaf in leaves if leaf.experts for name in leaf.modules(prefix)]
    return LoraConfig(
        task_type="CAUSAL_LM",
        base_model_name_or_path=model.id,
        revision=model.revision,
        r=lora.rank,
        lora_alpha=lora.alpha,  # type: ignore[arg-type]  # PEFT divides it, whole or not
        use_rslora=lora.use_rslora,
        lora_dropout=lora.dropout,
        rank_pattern=dict(lora.rank_pattern),
        alpha_pattern=dict(lora.alpha_pattern),
        # A list would be matched by the ends of names, which takes in vision and audio towers as well.
        target_modules=module_regex(modules, [name for name, _ in base.named_modules()]) if modules else [],
        target_parameters=experts or None,
        trainable_token_indices={"embed_tokens": list(token_ids)} if token_ids else None,
    )


def add_adapter(
    recipe: Recipe, config: GemmaConfig, base: PreTrainedModel, model: ModelFolder, token_ids: Sequence[int]
) -> PeftModel:
    """Put the recipe's adapter around a base, in float32, drawn from the recipe's seed on the CPU.

    The same draw whichever device trains: A is uniform as PEFT has it, B is zero, trained rows start at the base's.

    Raises:
        UserError: a target or a pattern matches nothing.
    """
    leaves = plan_adapter(config, recipe.lora)
    torch.manual_seed(recipe.seed)
    base.name_or_path = model.id  # PEFT writes it down as what the adapter belongs to
    adapted = get_peft_model(base, adapter_config(recipe.lora, leaves, base, model, token_ids))
    for name, parameter in trained_parameters(adapted).items():
        if parameter.dtype != torch.float32:  # rows of tokens come in the embedding's type
            owner, _, leaf = name.rpartition(".")
            adapted.get_submodule(owner).register_parameter(leaf, nn.Parameter(parameter.detach().float()))
    return adapted


def trained_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """What gets gradients, by name."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def parameter_specs(model: nn.Module, config: GemmaConfig, shape: Mapping[str, int]) -> dict[str, Spec]:
    """Mesh axes of every parameter of the text model and its adapter, by its name in the model.

    LoRA's matrices follow the weight beside which they stand: A (r, in) is cut as its inputs, B (out, r) as its
    outputs, trained rows (n, D) as the embedding's columns.
    """
    dims = {name: param.dims for param in param_table(config) for name in param.tensor_names("")}
    specs = {}
    for name, _ in model.named_parameters():
        found = _dims(name, dims)
        if found is not None:
            specs[name] = param_spec(found, shape)
    return specs


def _dims(name: str, table: Mapping[str, Sequence[Dim]]) -> Sequence[Dim] | None:
    lora, rows = _LORA.fullmatch(name), _ROWS.fullmatch(name)
    weight = f"{(lora or rows)[1]}.weight" if lora or rows else name  # type: ignore[index]
    weight = weight.removeprefix(PEFT_PREFIX).replace(".token_adapter", "").replace(".base_layer", "")
    if weight == "lm_head.weight":
        weight = "embed_tokens.weight"
    prefix = next((p for p in sorted(PREFIXES, key=len, reverse=True) if weight.startswith(p)), "")
    dims = table.get(weight.removeprefix(prefix))
    if dims is None or (lora and len(dims) != 2):
        return None  # vision and audio towers, buffers, experts' adapters
    if lora:
        rank = Dim(1)
        return (rank, dims[1]) if lora[2] == "A" else (dims[0], rank)
    return (Dim(1), dims[1]) if rows else dims


def softcap(base: PreTrainedModel) -> float | None:
    """Bound of the logits, which are squashed by tanh; None without one."""
    found: Any = getattr(base.config.get_text_config(), "final_logit_softcapping", None)
    return found


def head_logits(base: Any, hidden: torch.Tensor) -> torch.Tensor:
    """Logits in float32, (..., V)."""
    logits = base.lm_head(hidden).float()
    bound = softcap(base)
    return logits if bound is None else bound * torch.tanh(logits / bound)
