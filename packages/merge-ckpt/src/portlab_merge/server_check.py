"""Would a server apply the exported adapter? Answered from the plan, before anything is written or rented.

What is known of servers stands in `portlab_spec.serving`.
"""

import json
import shlex
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from portlab_merge.peft_format import EXPERTS, KeyStyle, module_path
from portlab_merge.plan import LoraTarget, Plan
from portlab_spec.errors import UserError
from portlab_spec.models.config import GemmaConfig
from portlab_spec.serving import (
    JAX_MODELS,
    MAX_RANKS,
    MODELS,
    RELEASES,
    Server,
    half_applied_keys,
    max_rank_for,
    server_module,
    unknown_modules,
)


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
            paths = [module_path(t.tensor, key_style) for t in plan.targets]
            modules = {path: server_module(path, names) for path in paths}
            found = [modules[module_path(t.tensor, key_style)] for t in linears]
            reasons += unknown_modules(found, config, names.prefix)
            reasons += half_applied_keys(found, config, names.prefix)
        else:
            reasons.append(f"the names of its modules are not known for architecture {architecture}")
        reasons += _expert_reasons(experts, config, server)
    native = server == "vllm-tpu" and architecture in JAX_MODELS
    return ServerReport(
        server=server,
        release=RELEASES[server],
        path="torchax" if server == "vllm-tpu" else "vLLM",
        modules=modules,
        max_rank=max_rank_for(rank),
        fused_experts=bool(experts),
        environment={"MODEL_IMPL_TYPE": "vllm"} if native else {},
        reasons=tuple(reasons),
        notes=tuple(_notes(plan, server, native)),
    )


def _is_expert(target: LoraTarget) -> bool:
    return len(target.shape) == 3


def _is_embedding(target: LoraTarget) -> bool:
    return target.tensor.endswith(("embed_tokens.weight", "embed_tokens_per_layer.weight", "lm_head.weight"))


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
