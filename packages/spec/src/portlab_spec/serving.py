"""What servers do with a checkpoint and with an adapter: facts about vLLM and vLLM-TPU, read in their code, not run.

vLLM compares the last part of a module's name with those it can adapt, and drops in silence what its model does not
have under the full name (vllm-project/vllm#34186, #41754, #48019, #55193). So every module is looked up here under the
name that the server would give it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from portlab_spec.models.config import GemmaConfig
from portlab_spec.models.table import param_table

Server = Literal["vllm", "vllm-tpu"]
# The releases that the facts below were read in, in November 2026.
RELEASES: dict[Server, str] = {"vllm": "vLLM 0.33.0", "vllm-tpu": "vllm-tpu 0.32.0 with tpu-inference 0.32.0"}
# vllm/config/lora.py, MaxLoRARanks. Memory is set aside for the whole of it.
MAX_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
DEFAULT_MAX_RANK = 16


@dataclass(frozen=True)
class Names:
    """What a model class of vLLM calls the text model.

    Attributes:
        prefix: of its modules.
        takes: prefixes of the text model's tensors in a checkpoint that it loads.
        renames: prefixes of an adapter's modules and what becomes of them, in turn (`hf_to_vllm_mapper`).
        beside: prefixes of further tensors that it loads or passes over; any other tensor is an error to it.
        multimodal: it needs a processor.
    """

    prefix: str
    takes: tuple[str, ...]
    renames: tuple[tuple[str, str], ...] = ()
    beside: tuple[str, ...] = ()
    multimodal: bool = False


_NESTED = ("model.language_model.", "language_model.model.")


def _with_and_without_model(*names: str) -> tuple[str, ...]:
    return tuple(f"{outer}{name}" for outer in ("model.", "") for name in names)


_ENCODERS = _with_and_without_model("vision_tower.", "audio_tower.", "embed_vision.", "embed_audio.")
_GEMMA4 = Names(
    "language_model.model.",
    (*_NESTED, "model."),
    (_NESTED, ("model", "language_model.model")),
    (*_ENCODERS, "lm_head."),
    multimodal=True,
)
# vllm/model_executor/models/gemma{3,3_mm,4,4_mm,4_unified}.py; the same in both releases.
MODELS = {
    "Gemma3ForCausalLM": Names("model.", ("model.",), beside=("lm_head.",)),
    "Gemma3ForConditionalGeneration": Names(
        "language_model.model.",
        _NESTED,
        (_NESTED,),
        (*_with_and_without_model("vision_tower.", "multi_modal_projector."), "lm_head.", "language_model.lm_head."),
        multimodal=True,
    ),
    "Gemma4ForCausalLM": Names(
        "model.", ("model.language_model.", "model."), (("model.language_model.", "model."),), (*_ENCODERS, "lm_head.")
    ),
    "Gemma4ForConditionalGeneration": _GEMMA4,
    "Gemma4UnifiedForConditionalGeneration": _GEMMA4,
}
# tpu_inference/models/common/model_loader.py: these run as JAX models, which take no adapter (`lora_manager` is None).
# All others fall back to vLLM's own classes through torchax, which do; MODEL_IMPL_TYPE=vllm says so for these too.
JAX_MODELS = ("Gemma4ForCausalLM", "Gemma4ForConditionalGeneration")
# The JAX models read one layout, that of the multimodal checkpoint, and the text model's config inside another.
JAX_PREFIX = "model.language_model."


def server_module(path: str, names: Names) -> str:
    """The name that a server gives to a module of an adapter."""
    for old, new in names.renames:
        if path.startswith(old):
            path = new + path.removeprefix(old)
    return path


def max_rank_for(rank: int) -> int:
    """The least value of --max-lora-rank that takes a rank; 0 if none does."""
    return next((allowed for allowed in MAX_RANKS if allowed >= rank), 0)


def unknown_modules(found: Sequence[str], config: GemmaConfig, prefix: str) -> Iterator[str]:
    """Adapted modules, by the server's names, that its model does not have: those it refuses, those it ignores."""
    have = {module for param in param_table(config) if param.target for module in param.modules(prefix)}
    missing = [name for name in found if name not in have]
    loud = {name.rpartition(".")[2] for name in missing} - {name.rpartition(".")[2] for name in have}
    silent = [name for name in missing if name.rpartition(".")[2] not in loud]
    if loud:
        yield f"the server is not known to adapt modules named {', '.join(sorted(loud))}"
    if silent:
        yield (
            f"{len(silent)} of {len(found)} modules are not in the server's model, first {silent[0]} "
            f"(its own start with {prefix}layers): it would serve the base there, in silence"
        )


def half_applied_keys(found: Sequence[str], config: GemmaConfig, prefix: str) -> Iterator[str]:
    """Where values are the projected keys, k_proj's update moves both; the server adds it to the keys alone."""
    layers = [i for i, kind in enumerate(config.layers) if kind.key_is_value]
    if hit := [i for i in layers if f"{prefix}layers.{i}.self_attn.k_proj" in found]:
        yield (
            f"k_proj of layers {', '.join(map(str, hit))} gives the values too, and is adapted: "
            "the server would move the keys only, in silence"
        )
