"""Would a server apply the exported adapter? Answered from the plan, before anything is written or rented.

vLLM compares the last part of a module's name with those it can adapt, and drops in silence what its model does not
have under the full name (vllm-project/vllm#34186, #41754, #48019, #55193). So every module is looked up here under the
name that the server would give it. What is said of servers was read in their code (see `RELEASES`), not run.
"""

import json
import shlex
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from portlab_merge.peft_format import EXPERTS, KeyStyle, module_path
from portlab_merge.plan import LoraTarget, Plan
from portlab_spec.errors import UserError
from portlab_spec.models.config import GemmaConfig
from portlab_spec.models.table import param_table

Server = Literal["vllm", "vllm-tpu"]
# The releases that the facts below were read in, in November 2026.
RELEASES: dict[Server, str] = {"vllm": "vLLM 0.33.0", "vllm-tpu": "vllm-tpu 0.32.0 with tpu-inference 0.32.0"}
# vllm/config/lora.py, MaxLoRARanks. Memory is set aside for the whole of it.
MAX_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)


@dataclass(frozen=True)
class _Names:
    """What a model class of vLLM calls the text model.

    Attributes:
        prefix: of its modules.
        renames: prefixes of an adapter's modules and what becomes of them, in turn (`hf_to_vllm_mapper`).
    """

    prefix: str
    renames: tuple[tuple[str, str], ...] = ()


_NESTED = ("model.language_model.", "language_model.model.")
_GEMMA4 = _Names("language_model.model.", (_NESTED, ("model", "language_model.model")))
# vllm/model_executor/models/gemma{3,3_mm,4,4_mm,4_unified}.py; the same in both releases.
MODELS = {
    "Gemma3ForCausalLM": _Names("model."),
    "Gemma3ForConditionalGeneration": _Names("language_model.model.", (_NESTED,)),
    "Gemma4ForCausalLM": _Names("model.", (("model.language_model.", "model."),)),
    "Gemma4ForConditionalGeneration": _GEMMA4,
    "Gemma4UnifiedForConditionalGeneration": _GEMMA4,
}
# tpu_inference/models/common/model_loader.py: these run as JAX models, which take no adapter (`lora_manager` is None).
# All others fall back to vLLM's own classes through torchax, which do; MODEL_IMPL_TYPE=vllm says so for these too.
JAX_MODELS = ("Gemma4ForCausalLM", "Gemma4ForConditionalGeneration")


@dataclass(frozen=True)
class ServerReport:
    """What a server would make of an adapter.

    Attributes:
        server: which.
        release: that the facts were read in.
        path: the implementation that serves it.
        modules: name that the server gives each adapted module, by its name in the adapter.
        max_rank: value of --max-lora-rank; 0 if none is large enough.
        fused_experts: experts are adapted, in PEFT's fused layout.
        environment: variables to set.
        reasons: why it would not work, one line each.
        notes: what to know if it does.
    """

    server: Server
    release: str
    path: str
    modules: Mapping[str, str]
    max_rank: int
    fused_experts: bool = False
    environment: Mapping[str, str] = field(default_factory=dict)
    reasons: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def works(self) -> bool:
        """Does nothing speak against it?"""
        return not self.reasons

    def flags(self, adapter: str, name: str = "adapter") -> list[str]:
        """What to add to `vllm serve MODEL`, for the adapter in a folder, asked for as model `name`."""
        module = f"{name}={adapter}"
        experts = []
        if self.fused_experts:
            experts = ["--enable-mixed-moe-lora-format"]
            module = json.dumps({"name": name, "path": adapter, "is_3d_lora_weight": True})
        elif "," in adapter:  # which vLLM takes for JSON
            module = json.dumps({"name": name, "path": adapter})
        return ["--enable-lora", "--max-lora-rank", str(self.max_rank), *experts, "--lora-modules", module]

    def command(self, model: str, adapter: str, name: str = "adapter") -> str:
        """The line for a shell that serves it."""
        variables = [f"{key}={value}" for key, value in self.environment.items()]
        return " ".join([*variables, shlex.join(["vllm", "serve", model, *self.flags(adapter, name)])])


def check_server(plan: Plan, server: Server, key_style: KeyStyle = "new") -> ServerReport:
    """Would the server apply all of the adapter that `export_adapter(plan, out, key_style)` writes?

    Nothing is read or run: the plan, and what is known of the server.
    """
    architecture = str((plan.base.config.get("architectures") or ["none"])[0])
    # The server compares its flag with the common rank as well, though no module may have it.
    rank = max([plan.checkpoint.adapter.lora.rank, *(target.rank for target in plan.targets)])
    reasons = list(_rank_reasons(rank)) + list(_embedding_reasons(plan))
    linears = [t for t in plan.targets if not _is_expert(t) and not _is_embedding(t)]
    experts = [t for t in plan.targets if _is_expert(t)]
    modules: dict[str, str] = {}
    try:
        config = GemmaConfig.from_dict(plan.base.config, where=str(plan.base.folder / "config.json"))
    except UserError as error:
        reasons.append(error.what)
    else:
        if names := MODELS.get(architecture):
            modules = {path: _rename(path, names) for path in (module_path(t.tensor, key_style) for t in plan.targets)}
            found = [modules[module_path(t.tensor, key_style)] for t in linears]
            reasons += _name_reasons(found, config, names.prefix)
            reasons += _key_value_reasons(found, config, names.prefix)
        else:
            reasons.append(f"the names of its modules are not known for architecture {architecture}")
        reasons += _expert_reasons(experts, config, server)
    native = server == "vllm-tpu" and architecture in JAX_MODELS
    return ServerReport(
        server=server,
        release=RELEASES[server],
        path="torchax" if server == "vllm-tpu" else "vLLM",
        modules=modules,
        max_rank=next((allowed for allowed in MAX_RANKS if allowed >= rank), 0),
        fused_experts=bool(experts),
        environment={"MODEL_IMPL_TYPE": "vllm"} if native else {},
        reasons=tuple(reasons),
        notes=tuple(_notes(plan, server, native)),
    )


def _is_expert(target: LoraTarget) -> bool:
    return len(target.shape) == 3


def _is_embedding(target: LoraTarget) -> bool:
    return target.tensor.endswith(("embed_tokens.weight", "embed_tokens_per_layer.weight", "lm_head.weight"))


def _rename(path: str, names: _Names) -> str:
    for old, new in names.renames:
        if path.startswith(old):
            path = new + path.removeprefix(old)
    return path


def _rank_reasons(rank: int) -> Iterator[str]:
    if rank > MAX_RANKS[-1]:
        yield f"rank {rank} is beyond {MAX_RANKS[-1]}, the largest that --max-lora-rank takes"


def _embedding_reasons(plan: Plan) -> Iterator[str]:
    if plan.rows:
        yield (
            f"{len(plan.rows.ids)} trained rows of {plan.rows.tensor} are nothing that the server applies: "
            "it refuses the file, and without them the adapter is not what was trained"
        )
    if tensors := [t.tensor for t in plan.targets if _is_embedding(t)]:
        yield f"{tensors[0]} is adapted, and the server adapts linear layers only in Gemma: it refuses the file"


def _name_reasons(found: list[str], config: GemmaConfig, prefix: str) -> Iterator[str]:
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


def _key_value_reasons(found: list[str], config: GemmaConfig, prefix: str) -> Iterator[str]:
    """Where values are the projected keys, k_proj's update moves both; the server adds it to the keys alone."""
    layers = [i for i, kind in enumerate(config.layers) if kind.key_is_value]
    if hit := [i for i in layers if f"{prefix}layers.{i}.self_attn.k_proj" in found]:
        yield (
            f"k_proj of layers {', '.join(map(str, hit))} gives the values too, and is adapted: "
            "the server would move the keys only, in silence"
        )


def _expert_reasons(experts: list[LoraTarget], config: GemmaConfig, server: Server) -> Iterator[str]:
    if server == "vllm-tpu" and config.experts:
        yield "a model with experts takes no adapter on TPU: its kernels for experts do not allow --enable-lora"
        return
    adapted: dict[str, set[str]] = defaultdict(set)
    for target in experts:
        module, _, parameter = target.tensor.rpartition(".")
        adapted[module].add(parameter)
    if lone := [module for module, parameters in adapted.items() if parameters != set(EXPERTS)]:
        yield f"{lone[0]} is adapted in {adapted[lone[0]].pop()} alone, the server takes {' and '.join(EXPERTS)}"


def _notes(plan: Plan, server: Server, native: bool) -> Iterator[str]:
    lora = plan.checkpoint.adapter.lora
    if native:
        yield (
            "By default this model runs as a JAX model, which takes no adapter. MODEL_IMPL_TYPE=vllm chooses the way "
            "through torchax, which does; the merged model runs either way"
        )
    elif server == "vllm-tpu":
        yield "Adapters on TPU are served through torchax; the merged model is the simpler choice"
    if lora.rank_pattern or lora.alpha_pattern:
        yield "Ranks or alphas differ between modules, which older releases ignored: they scaled all modules alike"
    if any(_is_expert(target) for target in plan.targets):
        yield "Updates of experts run in a Triton kernel: on a GPU, not on a CPU"
    yield "The server rounds the adapter to the dtype of the model"
