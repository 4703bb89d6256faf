"""Would the server load this folder, and serve what was trained? Each check reads headers and small files only.

The cases are those of public reports: names of another class (vllm#15031, #19139), a tied head that was exported
(vllm#3323, LlamaFactory#2789), missing weights (vllm#14828), a lost stop token (unsloth#5386, vllm#45591), no processor
(llm-compressor#1305), two architectures (an assertion in tpu-inference).
"""

import re
from collections.abc import Iterator

import numpy as np

from portlab_serve.findings import Finding, error, note, warning
from portlab_serve.model_folder import ModelFolder
from portlab_serve.targets import Implementation
from portlab_spec.errors import UserError
from portlab_spec.formats import find_format
from portlab_spec.models.config import GemmaConfig
from portlab_spec.models.table import find_prefix, param_table
from portlab_spec.serving import JAX_MODELS, JAX_PREFIX, MODELS, Names

_PROCESSORS = ("processor_config.json", "preprocessor_config.json")
_HEADS = ("lm_head.weight", "model.lm_head.weight", "language_model.lm_head.weight")
# Layers that share keys and values need none of these; published checkpoints hold them all the same.
_SHARED = re.compile(r"layers\.(\d+)\.self_attn\.(?:k_proj|v_proj|k_norm)\.")
_ROWS = 512  # of the embedding, to tell a head from it


def check_model(model: ModelFolder, implementation: Implementation, tool_format: str | None) -> Iterator[Finding]:
    """All checks of a folder, for whose code serves it and the format that it is to call tools in."""
    yield from _architecture(model, implementation)
    yield from _names(model, implementation)
    yield from _head(model)
    yield from _processor(model)
    yield from _tokens(model, tool_format)
    yield from _stop_ids(model, tool_format)


def _architecture(model: ModelFolder, implementation: Implementation) -> Iterator[Finding]:
    where = str(model.path / "config.json")
    if len(model.architectures) != 1:
        yield error(
            "architecture",
            f"architectures is {list(model.architectures)}, and the server wants exactly one",
            where,
            f"Keep one of {', '.join(MODELS)}",
        )
    elif model.architecture not in MODELS:
        yield note("architecture", f"the tensor names of {model.architecture} are not known here: not checked", where)
    if implementation == "jax" and model.architecture in JAX_MODELS and "text_config" not in model.raw:
        yield error(
            "architecture",
            "the JAX model reads text_config, and the config has none: it is that of a text-only export",
            where,
            "Serve the multimodal layout (merge-ckpt keeps that of its base), or set MODEL_IMPL_TYPE=vllm",
        )


def _names(model: ModelFolder, implementation: Implementation) -> Iterator[Finding]:
    names = MODELS.get(model.architecture)
    if model.tensors is None or names is None or model.config is None:
        return
    if model.raw.get("quantization_config"):
        yield note("weights", "the weights are quantised: names and shapes are not checked", str(model.path))
        return
    takes = (JAX_PREFIX,) if implementation == "jax" else names.takes
    try:
        prefix = find_prefix(model.tensors, str(model.path))
    except UserError as raised:
        yield error("weights", raised.what, raised.where, raised.fix)
        return
    if prefix not in takes:
        yield error(
            "weights",
            f"tensors are named {prefix}*, and {model.architecture} ({implementation}) takes {'* or '.join(takes)}*",
            str(model.path),
            _other_class(prefix, model, implementation),
        )
        return
    yield from _against_table(model, model.config, names, prefix)
    if implementation == "jax":
        yield from _shared_norms(model, model.config, prefix)


def _other_class(prefix: str, model: ModelFolder, implementation: Implementation) -> str:
    if implementation == "jax":
        return "Set MODEL_IMPL_TYPE=vllm, or merge into the multimodal checkpoint"
    family = model.architecture[:6]
    fitting = [name for name, names in MODELS.items() if name.startswith(family) and prefix in names.takes]
    return f"Set architectures in config.json to {' or '.join(fitting)}, or merge again from the published base"


def _against_table(model: ModelFolder, config: GemmaConfig, names: Names, prefix: str) -> Iterator[Finding]:
    """Missing, unknown and misshapen tensors of the text model."""
    tensors, where = model.tensors or {}, str(model.path)
    expected = {
        name: param.shape for param in param_table(config) if not param.buffer for name in param.tensor_names(prefix)
    }
    known = {name for param in param_table(config) for name in param.tensor_names(prefix)}
    if missing := [name for name in expected if name not in tensors]:
        yield error(
            "weights",
            f"{len(missing)} of {len(expected)} tensors are missing, first {missing[0]}: they would stay random",
            where,
            "Merge or download again",
        )
    shared = {i for i, kind in enumerate(config.layers) if kind.shares_kv}
    unknown = [
        name
        for name in tensors
        if name not in known
        and not name.startswith(names.beside)
        and not name.endswith("rotary_emb.inv_freq")
        and not ((match := _SHARED.search(name)) and int(match[1]) in shared)
    ]
    if unknown:
        yield error(
            "weights",
            f"{len(unknown)} tensors are unknown to {model.architecture}, first {unknown[0]}: it refuses them",
            where,
            "An adapter's tensors are merged with merge-ckpt; others do not belong here",
        )
    for name, shape in expected.items():
        if name in tensors and tensors[name].shape != shape:
            yield error(
                "weights",
                f"{name} has shape {list(tensors[name].shape)}, config.json says {list(shape)}",
                where,
                "Take config and weights of one model",
            )
            return


def _shared_norms(model: ModelFolder, config: GemmaConfig, prefix: str) -> Iterator[Finding]:
    lacking = [
        i
        for i, kind in enumerate(config.layers)
        if kind.shares_kv and f"{prefix}layers.{i}.self_attn.k_norm.weight" not in (model.tensors or {})
    ]
    if lacking:
        yield warning(
            "weights",
            f"layers {lacking[0]} to {lacking[-1]} share keys and have no k_norm, which the JAX loader asked for "
            "(tpu-inference#3225)",
            str(model.path),
            "If it fails, set MODEL_IMPL_TYPE=vllm",
        )


def _head(model: ModelFolder) -> Iterator[Finding]:
    """A head in the file of a model whose head is its embedding."""
    tensors = model.tensors or {}
    name = next((name for name in _HEADS if name in tensors), None)
    if name is None or model.config is None or not model.config.tie_word_embeddings:
        return
    embedding = next((view for key, view in tensors.items() if key.endswith("embed_tokens.weight")), None)
    if embedding is None:
        return
    head = tensors[name]
    step = max(1, embedding.shape[0] // _ROWS)
    if head.shape != embedding.shape or not np.array_equal(
        head.numpy()[::step].view(np.uint8), embedding.numpy()[::step].view(np.uint8)
    ):
        yield error(
            "head",
            f"{name} differs from the embedding, and the config ties the two: the server would use the embedding",
            str(model.path),
            "Train without a head of its own, or set tie_word_embeddings to false",
        )
    else:
        yield warning(
            "head",
            f"{name} repeats the tied embedding, which some releases refuse (vllm#3323)",
            str(model.path),
            "Leave it out of the file: merge-ckpt does",
        )


def _processor(model: ModelFolder) -> Iterator[Finding]:
    names = MODELS.get(model.architecture)
    if names and names.multimodal and not any((model.path / file).is_file() for file in _PROCESSORS):
        yield error(
            "processor",
            f"{model.architecture} is multimodal and needs {' or '.join(_PROCESSORS)}",
            str(model.path),
            "Copy it from the base, also to serve text alone",
        )


def _tokens(model: ModelFolder, tool_format: str | None) -> Iterator[Finding]:
    if model.tokens is None:
        return
    where = str(model.path / "tokenizer.json")
    if tool_format is None:
        yield note("tokenizer", "its control tokens are those of no format here: no tool parser is set", where)
        return
    wanted = find_format(tool_format).control_tokens
    if missing := [token for token in wanted if token not in model.tokens]:
        yield error(
            "tokenizer",
            f"has no token {missing[0]}, which {tool_format} needs",
            where,
            "Serve the tokenizer that the model was trained with, or choose another --tool-format",
        )
    rows = _vocabulary(model)
    if rows and model.tokens and (largest := max(model.tokens.values())) >= rows:
        yield error(
            "tokenizer", f"has id {largest}, and the embedding {rows} rows", where, "Take the model's own tokenizer"
        )


def _vocabulary(model: ModelFolder) -> int:
    views = (view for name, view in (model.tensors or {}).items() if name.endswith("embed_tokens.weight"))
    return next((view.shape[0] for view in views), 0)


def _stop_ids(model: ModelFolder, tool_format: str | None) -> Iterator[Finding]:
    if model.tokens is None or tool_format is None:
        return
    stops, where = model.stops
    wanted = {model.tokens[t]: t for t in find_format(tool_format).stop_tokens if t in model.tokens}
    if missing := {i: token for i, token in wanted.items() if i not in stops}:
        named = ", ".join(f"{i} {token}" for i, token in missing.items())
        yield error(
            "stops",
            f"eos_token_id is {list(stops)} and lacks {named}: generation would run on",
            where,
            f"Set eos_token_id to {sorted({*stops, *wanted})} in generation_config.json",
        )
