"""Tool parsers over HTTP: a server whose outputs are given, asked whole and streamed.

The model is tiny and random, its tokenizer the real one; `serving.forced_output` says what it answers. So every output
on which parsers are known to disagree passes through vLLM's own detokenising, streaming and parsing.
"""

import json
import shutil
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import openai

from bench_parsers import Row, fixtures, loose, rows, same
from other_parsers import Calls
from portlab_serve.parser_names import PARSER_NAMES
from portlab_spec.assets import default_model
from portlab_spec.conversation import Conversation, Message, Tool, ToolCall
from portlab_spec.errors import UserError
from portlab_spec.files import write_json
from portlab_spec.fixtures.cases import BODIES
from portlab_spec.formats import find_format
from portlab_spec.formats.markers import FUNCTIONGEMMA, GEMMA4
from portlab_spec.models.config import GemmaConfig
from portlab_spec.models.table import param_table
from portlab_spec.safetensors_file import Writer
from portlab_spec.tokenizer import GEMMA4_TOKENS, Tokenizer
from vllm_server import VllmServer

AT_ONCE = 16
TINY: dict[str, Any] = {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "vocab_size": 262_144,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"],
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "query_pre_attn_scalar": 64,
    "sliding_window": 512,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000.0,
    "rope_local_base_freq": 10_000.0,
    "hidden_activation": "gelu_pytorch_tanh",
    "bos_token_id": 2,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "torch_dtype": "float32",
}
# What a request offers; outputs name other tools too, which is the application's to refuse.
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}


@dataclass(frozen=True)
class Contender:
    """A parser in a server: its name there, and whose plug-in it is."""

    parser: str
    tool_format: str
    ours: bool


# vLLM has no parser of its own for Gemma 3's JSON.
THEIRS = {"functiongemma": "functiongemma", "gemma4": "gemma4", "gemma3-python": "pythonic"}
CONTENDERS = tuple(
    contender
    for name in ("functiongemma", "gemma4", "gemma3-json", "gemma3-python")
    for contender in (
        Contender(PARSER_NAMES[name], name, True),
        *([Contender(THEIRS[name], name, False)] if name in THEIRS else ()),
    )
)


@dataclass(frozen=True)
class Said:
    """What a client got of one output."""

    calls: Calls
    content: str
    fault: str = ""


@dataclass(frozen=True)
class Outcome:
    """All outputs of a format through one parser, whole and streamed."""

    rows: list[Row]
    whole: list[Said]
    streamed: list[Said]
    fixtures: list[tuple[str, Calls]]
    fixtures_whole: list[Said]
    fixtures_streamed: list[Said]

    def figures(self) -> dict[str, Any]:
        """Counts, as in docs/parsing.md."""
        return {
            "outputs read right": {"whole": self._right(self.whole), "streamed": self._right(self.streamed)},
            "outputs": len(self.rows),
            "calls nobody wrote": {"whole": self._wrong(self.whole), "streamed": self._wrong(self.streamed)},
            "fixtures read right": {
                "whole": self._fixtures_right(self.fixtures_whole),
                "streamed": self._fixtures_right(self.fixtures_streamed),
            },
            "fixtures": len(self.fixtures),
            "streamed as whole": sum(
                a == b
                for a, b in zip(
                    [*self.whole, *self.fixtures_whole], [*self.streamed, *self.fixtures_streamed], strict=True
                )
            ),
            "requests that failed": sum(
                bool(s.fault) for s in (*self.whole, *self.streamed, *self.fixtures_whole, *self.fixtures_streamed)
            ),
        }

    def misread(self) -> list[dict[str, Any]]:
        """The outputs and fixtures that were not read right, with what came instead."""
        wanted = [(row.output, row.calls, same) for row in self.rows]
        known = [(output, calls, lambda a, b: loose(a) == loose(b)) for output, calls in self.fixtures]
        return [
            {"output": output, "right": right, mode: said.fault or said.calls, "content": said.content}
            for pairs, whole, streamed in (
                (wanted, self.whole, self.streamed),
                (known, self.fixtures_whole, self.fixtures_streamed),
            )
            for mode, found in (("whole", whole), ("streamed", streamed))
            for (output, right, equal), said in zip(pairs, found, strict=True)
            if said.fault or not equal(said.calls, right)
        ]

    def _right(self, found: Sequence[Said]) -> int:
        return sum(same(s.calls, row.calls) and not s.fault for row, s in zip(self.rows, found, strict=True))

    def _wrong(self, found: Sequence[Said]) -> int:
        return sum(bool(s.calls) and not same(s.calls, row.calls) for row, s in zip(self.rows, found, strict=True))

    def _fixtures_right(self, found: Sequence[Said]) -> int:
        pairs = zip(self.fixtures, found, strict=True)
        return sum(loose(s.calls) == loose(calls) and not s.fault for (_, calls), s in pairs)


def outputs_of(tool_format: str) -> tuple[list[Row], list[tuple[str, Calls]]]:
    """The outputs of a format with what is right, and fixtures.

    Of the native formats those on which parsers disagree; of Gemma 3's the calls that they all hold, written anew.
    """
    for markers, name in ((FUNCTIONGEMMA, "functiongemma"), (GEMMA4, "gemma4")):
        if name == tool_format:
            return rows(markers), fixtures(markers) or []
    return list(_written(tool_format)), []


def _written(tool_format: str) -> Iterator[Row]:
    fmt = find_format(tool_format)
    for case in BODIES:
        if case.strict is None:
            continue
        call = ToolCall(name=case.name, arguments=case.strict)
        messages = (Message(role="user", content="Go on."), Message(role="assistant", tool_calls=(call,)))
        tool = Tool(name=case.name, description=case.reason, parameters={"type": "object", "properties": {}})
        try:
            segments = fmt.render(Conversation(id="case", tools=(tool,), messages=messages))
        except UserError:  # a name that a Python call cannot have
            continue
        text = "".join(s.text for s in segments if s.loss and s.text not in fmt.stop_tokens)
        calls: Calls = [(case.name, case.strict)]
        yield Row(text, text, case.reason, "grammar", calls, calls)


def tiny_model(folder: Path, tool_format: str) -> Path:
    """A random Gemma 3 of two layers with the default model's tokenizer, control tokens named as a format has them."""
    source = default_model().path
    tokenizer = Tokenizer.load(source)
    folder.mkdir(parents=True)
    if tool_format == "gemma4":
        tokenizer = tokenizer.renamed(GEMMA4_TOKENS)
    tokenizer.backend.save(str(folder / "tokenizer.json"))
    for name in ("tokenizer_config.json", "generation_config.json"):
        shutil.copyfile(source / name, folder / name)
    write_json(folder / "config.json", TINY)
    random = np.random.default_rng(0)
    shapes = {n: p.shape for p in param_table(GemmaConfig.from_dict(TINY)) for n in p.tensor_names("model.")}
    with Writer(folder / "model.safetensors", {n: (np.dtype(np.float32), s) for n, s in shapes.items()}) as writer:
        for name, shape in shapes.items():
            writer.write(name, random.normal(0, 0.05, shape).astype(np.float32))
    return folder


def try_parser(contender: Contender, python: Path, folder: Path) -> Outcome:
    """Serve the tiny model with a parser, and ask for every output of its format."""
    model = folder / contender.tool_format
    if not model.exists():
        tiny_model(model, contender.tool_format)
    options = ["--dtype", "float32", "--max-model-len", "2048", "--max-num-seqs", str(AT_ONCE)]
    options += ["--logits-processors", "serving.forced_output:ForcedOutput"]
    options += ["--tool-format", contender.tool_format]
    if not contender.ours:
        options += ["--tool-call-parser", contender.parser]
    outputs, known = outputs_of(contender.tool_format)
    tokenizer, end = Tokenizer.load(model), find_format(contender.tool_format).stop_tokens[-1]
    texts = [row.output for row in outputs] + [output for output, _ in known]
    log = folder / f"{contender.parser}.log"
    bench = str(Path(__file__).parents[1])
    with VllmServer(python, model, options, log, "portlab", {"PYTHONPATH": bench}) as server:
        client = openai.OpenAI(base_url=f"{server.root}/v1", api_key="none", max_retries=0, timeout=300)
        with ThreadPoolExecutor(AT_ONCE) as pool:
            # An answer has a token: one without text is the end of the turn.
            ids = [tokenizer.encode(text) or [tokenizer.token_id(end)] for text in texts]
            whole = list(pool.map(lambda forced: ask(client, forced), ids))
            streamed = list(pool.map(lambda forced: ask_streamed(client, forced), ids))
    n = len(outputs)
    return Outcome(outputs, whole[:n], streamed[:n], known, whole[n:], streamed[n:])


def request(ids: Sequence[int]) -> dict[str, Any]:
    """A chat request that is answered with exactly these tokens."""
    return {
        "model": "base",
        "messages": [{"role": "user", "content": "Go on."}],
        "tools": [TOOL],
        "temperature": 0,
        "max_tokens": len(ids),
        "extra_body": {"ignore_eos": True, "vllm_xargs": {"forced": list(ids)}},
    }


def ask(client: openai.OpenAI, ids: Sequence[int]) -> Said:
    """The whole answer at once."""
    try:
        message = client.chat.completions.create(**request(ids)).choices[0].message
        calls = [(c.function.name, c.function.arguments) for c in message.tool_calls or []]
        return _said(calls, message.content or "")
    except openai.OpenAIError as error:
        return Said([], "", f"{type(error).__name__}: {error}")


def ask_streamed(client: openai.OpenAI, ids: Sequence[int]) -> Said:
    """The answer in pieces, put together as clients do: by index, arguments appended."""
    names: dict[int, str] = {}
    arguments: dict[int, str] = {}
    content = ""
    try:
        for chunk in client.chat.completions.create(**request(ids), stream=True):
            for choice in chunk.choices:
                content += choice.delta.content or ""
                for call in choice.delta.tool_calls or []:
                    if call.function and call.function.name:
                        names[call.index] = names.get(call.index, "") + call.function.name
                    if call.function and call.function.arguments:
                        arguments[call.index] = arguments.get(call.index, "") + call.function.arguments
    except openai.OpenAIError as error:
        return Said([], content, f"{type(error).__name__}: {error}")
    return _said([(names[i], arguments.get(i, "")) for i in sorted(names)], content)


def _said(calls: Sequence[tuple[str, str]], content: str) -> Said:
    try:
        return Said([(name, json.loads(arguments)) for name, arguments in calls], content)
    except ValueError as error:
        return Said([], content, f"arguments are not JSON ({error}): {[a for _, a in calls]}")
