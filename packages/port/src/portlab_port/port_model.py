"""Model, format, method, quantisation and adapters."""

import re
from types import SimpleNamespace

from portlab_port.build import Build
from portlab_port.dialects.trl import SEVEN
from portlab_spec.errors import UserError
from portlab_spec.models.published import published_config, published_models
from portlab_spec.models.table import param_table
from portlab_spec.models.targets import plan_adapter

# Copies of Gemma under other names on the Hub: what bitsandbytes made of the weights is not read, the original is.
_COPY = re.compile(r"(-unsloth)?-bnb-4bit$", re.IGNORECASE)
_NOT_WEIGHTS = re.compile(r"gguf|awq|gptq|fp8|mlx|litert|onnx", re.IGNORECASE)
_KNOWN = {name.removesuffix("-it").removeprefix("google/").lower(): name.removesuffix("-it").removeprefix("google/")
          for name in published_models()}  # fmt: skip
_TEMPLATES = ("gemma", "functiongemma", "default", "tokenizer_default")
_ADAPTER_KEYS = ("r", "lora_alpha", "target_modules")


def method(build: Build) -> None:
    """Adapters, or all weights."""
    setting = build.find("use_lora")
    trains_lora = bool(setting.value) if setting else False
    build.note(setting, became=build.set("method", "lora" if trains_lora else "full"))
    if setting is None:
        build.fields["method"] = "full"
    written = [s for name in _ADAPTER_KEYS if (s := build.find(name)) and not s.default_of]
    if not trains_lora and written:
        keys = ", ".join(s.key for s in written)
        switch = {"trl": "use_peft: true", "command": "--use_peft", "axolotl": "adapter: lora"}.get(
            build.gpu.style, "LoRA"
        )
        build.fault(
            f"{keys} ({written[0].where}) would be ignored: without {switch} all weights are trained; set it, or "
            "remove them"
        )


def model(build: Build) -> None:
    """Model and wire format."""
    setting = build.find("model")
    if setting is None:
        if not any(s.name == "model" for s in build.gpu.settings):
            build.fault("no model is named: give it with --set model=ID")
        return
    base = setting.value.rstrip("/").rpartition("/")[2]
    stem, role = _split(_COPY.sub("", base))
    known = _KNOWN.get(stem)
    if known is None:
        known = next((name for low, name in _KNOWN.items() if stem.startswith(f"{low}-")), None)
        exact = False
    else:
        exact = True
    if known is None or _NOT_WEIGHTS.search(base):
        why = "weights of that kind are not read; name the original" if known else _why_unknown(stem)
        if build.refuse(setting, why, accepted=build.set("model", setting.value)):
            _format(build, None)
        return
    if exact and re.match(r"(google|unsloth)/", setting.value):
        identity = f"google/{known}{role}"
        became = build.set("model", identity)
        if identity == setting.value:
            build.note(setting, fate="carries", became=became)
        else:
            build.note(setting, became=became, why="the original of that copy; what bitsandbytes stored is not read")
    else:
        build.note(setting, fate="carries", became=build.set("model", setting.value))
    _format(build, known)
    build.carry("revision", "revision")


def quantize(build: Build) -> None:
    """Storage of the frozen layers."""
    four, eight = build.find("load_in_4bit"), build.find("load_in_8bit")
    of_model = build.find("model")
    stored = of_model is not None and _COPY.search(of_model.value) is not None
    if four and four.value and eight and eight.value:
        build.fault(f"{four.key} and {eight.key} are both true ({four.where}); keep one of them")
        return
    kind = "nf4" if (four and four.value) or (stored and not (four and four.value is False)) else "none"
    kind = "int8" if eight and eight.value else kind
    if kind != "none" and build.fields.get("method") == "full":
        build.fault(f"weights in {kind} ({(four or eight or of_model).where}) cannot be trained without adapters")  # type: ignore[union-attr]
    if kind != "none":
        build.set("lora.quantize", kind)
    for setting in (four, eight):
        if setting:
            on = bool(setting.value)
            build.note(
                setting,
                fate=None if on else "carries",
                became=f"lora.quantize: {kind}" if on else "",
                why=None if on else "not in use there, nor here",
            )
    kind_of = build.find("bnb_4bit_quant_type")
    if kind_of:
        same = kind_of.value == "nf4" or kind == "none"
        build.note(
            kind_of,
            fate="carries" if same else "changes",
            became="lora.quantize: nf4" if kind == "nf4" else "",
            why="the same 16 levels" if same else "nf4 is the one 4-bit type here, and loses less than fp4",
        )


def lora(build: Build) -> None:
    """Adapters."""
    if build.fields.get("method") != "lora":
        return
    for name, key in (
        ("r", "lora.rank"), ("lora_alpha", "lora.alpha"), ("lora_dropout", "lora.dropout"),
        ("use_rslora", "lora.use_rslora"), ("start_from", "lora.start_from"),
    ):  # fmt: skip
        build.carry(name, key)
    for name in ("r", "lora_alpha"):
        if not any(s.name == name for s in build.gpu.settings):
            build.fault(f"{name} of the adapter is not given: add it, or give --set {name}=VALUE")
    for name in ("rank_pattern", "alpha_pattern"):
        setting = build.find(name)
        if setting is not None and isinstance(setting.value, dict):
            build.note(setting, became=build.set(f"lora.{name}", setting.value) if setting.value else "")
    _targets(build)
    _rows(build)
    _check_targets(build)


def _split(name: str) -> tuple[str, str]:
    match = re.fullmatch(r"(.+?)(-it|-pt)?", name, re.IGNORECASE)
    return (match[1].lower(), (match[2] or "").lower()) if match else (name.lower(), "")


def _why_unknown(stem: str) -> str:
    if stem.startswith(("gemma-2", "gemma-1", "gemma-7b", "gemma-3n", "codegemma", "paligemma", "recurrentgemma")):
        return "of the Gemmas, Portlab trains 3 and 4; Gemma 1, 2 and 3n are not implemented"
    return "no model that Portlab knows: Gemma 3, FunctionGemma and Gemma 4 (train-torchax takes some others)"


def _format(build: Build, known: str | None) -> None:
    chosen = build.answers.format
    if chosen is None and known is None:
        build.fault("the model's family decides no wire format: give --format")
        return
    if chosen is None and known is not None:
        if known.startswith("gemma-4"):
            chosen = "gemma4" if known.split("-")[2] in ("E2B", "E4B") else "gemma4-31b"
        else:
            chosen = "functiongemma" if known.startswith("functiongemma") else "gemma3-json"
    became = build.set("format", chosen)
    template = build.find("chat_template")
    if template is None:
        return
    text = str(template.value)
    if text.lower().startswith(_TEMPLATES) and not text.endswith((".jinja", ".json")):
        build.note(template, fate="carries", became=became, why="Gemma's own template")
    else:
        build.refuse(template, "a template of one's own cannot be trained", accepted=became)


def _targets(build: Build) -> None:
    setting = build.find("target_modules")
    flags = {name: build.find(f"finetune_{name}_modules") for name in ("attention", "mlp")}
    if any(flags.values()) and (setting is None or setting.default_of or setting.value == "all-linear"):
        names = [*SEVEN[:4]] if build.value("finetune_attention_modules", True) else []
        names += [*SEVEN[4:]] if build.value("finetune_mlp_modules", True) else []
        became = build.set("lora.targets", tuple(names))
        for flag in flags.values():
            build.note(flag, became=became)
        build.note(setting, became=became, why="decided by the flags for attention and MLP")
        return
    if setting is None:
        return
    named = (setting.value,) if isinstance(setting.value, str) else tuple(map(str, setting.value))
    if len(named) == 1 and "," in named[0] and re.fullmatch(r"[\w., -]+", named[0]):
        named = tuple(part.strip() for part in named[0].split(",") if part.strip())
    if {"all-linear", "all", "all_linear"} & set(named):
        became = build.set("lora.targets", _linear_layers(build))
        why = "all linear layers of the text model; a vision tower's are never adapted"
        build.note(setting, became=became, why=why)
        return
    lost = [name for name in named if name in ("lm_head", "embed_tokens")]
    targets = tuple(name for name in named if name not in lost)
    layers = build.find("layers_to_transform")
    if layers is not None and layers.value not in ((), None):
        numbers = layers.value if isinstance(layers.value, tuple) else (layers.value,)
        chosen = "|".join(str(number) for number in numbers)
        targets = tuple(rf".*layers\.({chosen})\..*{re.escape(name)}" for name in targets)
        build.note(layers, became="lora.targets")
    became = build.set("lora.targets", targets)
    if lost:
        build.refuse(setting, f"{', '.join(lost)} has no adapter here", accepted=became)
    else:
        build.note(setting, fate="carries", became=became, why="the same layers, of the text model")


def _linear_layers(build: Build) -> tuple[str, ...]:
    config = published_config(_COPY.sub("", str(build.fields.get("model", ""))))
    if config is None:
        return SEVEN
    names = {p.name.rpartition(".")[2] for p in param_table(config) if p.target and not p.name.startswith("experts.")}
    return (*SEVEN, *sorted(names - set(SEVEN)))


def _rows(build: Build) -> None:
    """Rows of the embedding: ours train those of control tokens by default, PEFT none."""
    tokens = build.find("trainable_token_indices")
    saved = build.find("modules_to_save")
    wanted = tokens is not None and bool(tokens.value)
    if saved is not None and saved.value:
        why = f"{', '.join(saved.value)} cannot be trained whole beside adapters"
        wanted |= build.refuse(saved, why, accepted="lora.train_control_rows: true")
    became = build.set("lora.train_control_rows", wanted)
    build.note(tokens, became=became)


def _check_targets(build: Build) -> None:
    """Do the targets match layers of the model? Where its shape is published, that is known now."""
    config = published_config(str(build.fields.get("model", "")))
    if config is None or "lora.targets" not in build.fields:
        return
    # Their values are the recipe's to check.
    patterns = {
        name: dict.fromkeys(build.fields.get(f"lora.{name}", {}), 1) for name in ("rank_pattern", "alpha_pattern")
    }
    chosen = SimpleNamespace(rank=1, alpha=1.0, use_rslora=False, targets=build.fields["lora.targets"], **patterns)
    try:
        plan_adapter(config, chosen)
    except UserError as error:
        build.fault(f"{error.what}; {error.fix}")
