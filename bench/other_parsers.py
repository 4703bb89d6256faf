"""Other people's parsers of the native dialects, as they are published: text in, (name, arguments) pairs out.

Each is the real code, read out of its wheel, except the one that is published as a listing in documentation.
"""

import importlib.util
import json
import logging
import re
import sys
import tempfile
import types
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from portlab_spec.formats.markers import FUNCTIONGEMMA, GEMMA4, Markers
from wheels import member

Calls = list[tuple[str, Any]]
Parser = Callable[[str], Calls]

VLLM, MLX_LM = "vllm==0.33.0", "mlx-lm==0.32.2"


def published_regex(text: str) -> Calls:
    """As the FunctionGemma guide at ai.google.dev and the fitness-coach sample extract calls.

    Written anew from their behaviour: one expression for the call, one for the arguments, each value cast to int,
    float or bool if it can be, and stripped of spaces and quotes.
    """
    found = re.findall(r"<start_function_call>call[: ](\w+)\{(.*?)\}<end_function_call>", text, re.DOTALL)
    return [(name, {k: _cast(s or bare) for k, s, bare in _ARGUMENT.findall(body)}) for name, body in found]


_ARGUMENT = re.compile(r"(\w+):(?:<escape>(.*?)<escape>|([^,}]*))")


def _cast(text: str) -> int | float | bool | str:
    text = text.strip()
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return {"true": True, "false": False}.get(text.lower(), text.strip("'\""))


def mlx_lm(markers: Markers) -> Parser:
    """mlx-lm's parser of a dialect; its server hands it the text between the markers, call by call."""
    name = "function_gemma" if markers is FUNCTIONGEMMA else "gemma4"
    module = _module(MLX_LM, f"mlx_lm/tool_parsers/{name}.py")

    def parse(text: str) -> Calls:
        calls: Calls = []
        for after in text.split(markers.call)[1:]:
            body, end, _ = after.partition(markers.end_call)
            if end:
                found = module.parse_tool_call(body)
                calls += [(c["name"], c["arguments"]) for c in (found if isinstance(found, list) else [found])]
        return calls

    return parse


def vllm_functiongemma() -> Parser:
    """vLLM's `--tool-call-parser functiongemma`, not streaming.

    The module is run as it is; the parts of vLLM that it imports are records, a logger and a base class, for which
    stand-ins are enough, because the parsing uses none of their behaviour.
    """
    with _stand_ins():
        module = _module(VLLM, "vllm/tool_parsers/functiongemma_tool_parser.py")
    parser = module.FunctionGemmaToolParser(None)

    def parse(text: str) -> Calls:
        found = parser.extract_tool_calls(text, None)
        return [(call.function.name, json.loads(call.function.arguments)) for call in found.tool_calls]

    return parse


class _Record:
    """Stands in for vLLM's pydantic models: keeps what it is given."""

    def __init__(self, *args: Any, **fields: Any) -> None:
        self.__dict__.update(fields)


_STAND_INS: dict[str, dict[str, Any]] = {
    "vllm.entrypoints.generate.base.protocol": dict.fromkeys(
        (
            "DeltaFunctionCall",
            "DeltaMessage",
            "DeltaToolCall",
            "ExtractedToolCallInformation",
            "FunctionCall",
            "ToolCall",
        ),
        _Record,
    ),
    "vllm.entrypoints.openai.chat_completion.protocol": {"ChatCompletionRequest": _Record},
    "vllm.entrypoints.openai.responses.protocol": {"ResponsesRequest": _Record},
    "vllm.logger": {"init_logger": logging.getLogger},
    "vllm.renderers.chat_utils": {"make_tool_call_id": lambda: "call"},
    "vllm.tokenizers": {"TokenizerLike": object},
    "vllm.tool_parsers.abstract_tool_parser": {"Tool": object, "ToolParser": _Record},
}


@contextmanager
def _stand_ins() -> Any:
    """The modules of `_STAND_INS` and the packages above them, importable for a while."""
    names = {parent for name in _STAND_INS for parent in _parents(name)}
    missing = {name: types.ModuleType(name) for name in names if name not in sys.modules}
    for name, attributes in _STAND_INS.items():
        if name in missing:
            missing[name].__dict__.update(attributes)
    sys.modules.update(missing)
    try:
        yield
    finally:
        for name in missing:
            del sys.modules[name]


def _parents(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[: n + 1]) for n in range(len(parts))]


def _module(requirement: str, path: str) -> types.ModuleType:
    with tempfile.TemporaryDirectory() as folder:
        file = member(requirement, path, Path(folder))
        spec = importlib.util.spec_from_file_location(f"published_{file.stem}", file)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return module


OTHERS: dict[str, tuple[Markers, Callable[[], Parser]]] = {
    "published regex": (FUNCTIONGEMMA, lambda: published_regex),
    f"vLLM {VLLM.partition('==')[2]}": (FUNCTIONGEMMA, vllm_functiongemma),
    f"mlx-lm {MLX_LM.partition('==')[2]}": (FUNCTIONGEMMA, lambda: mlx_lm(FUNCTIONGEMMA)),
    f"mlx-lm {MLX_LM.partition('==')[2]} gemma4": (GEMMA4, lambda: mlx_lm(GEMMA4)),
}
