"""Tool parsers for vLLM: `--tool-parser-plugin portlab_serve.vllm_plugin --tool-call-parser portlab-functiongemma`.

Written against the interface of vLLM 0.32 (vllm/tool_parsers/abstract_tool_parser.py). The parsers say that they
stream like vLLM's engine-based ones (`engine_based_streaming`): then they see each piece of text once, and
`finish_streaming` is called at the end, which is when held-back text and an unclosed call are decided.
"""

from collections.abc import Sequence
from typing import Any, ClassVar

from vllm.entrypoints.generate.base.protocol import (
    DeltaFunctionCall,
    DeltaMessage,
    DeltaToolCall,
    ExtractedToolCallInformation,
    FunctionCall,
    ToolCall,
)
from vllm.exceptions import VLLMValidationError
from vllm.logger import init_logger
from vllm.reasoning import ReasoningParserManager
from vllm.reasoning.gemma4_engine_reasoning_parser import Gemma4ParserReasoningAdapter
from vllm.sampling_params import StructuredOutputsParams
from vllm.tool_parsers.abstract_tool_parser import ToolParser, ToolParserManager

from portlab_serve.forced_calls import forced_grammar
from portlab_serve.parser_names import PARSER_NAMES, REASONING_PARSER
from portlab_serve.tool_calls import OutputStream, Piece, read_output, split_thought
from portlab_spec.errors import UserError
from portlab_spec.formats import find_format

# Under vLLM's own name: loggers of others have no handler in its processes.
logger = init_logger(f"vllm.{__name__}")


class PortlabToolParser(ToolParser):
    """Reads the calls of one format; a subclass for each is registered below."""

    tool_format: ClassVar[str]
    engine_based_streaming = True
    # A forced call stays in the model's own format: JSON, to which vLLM would constrain it, is none that it was taught.
    supports_required_and_named = False

    def __init__(self, tokenizer: Any, tools: Any = None) -> None:
        super().__init__(tokenizer, tools)
        self._format = find_format(self.tool_format)
        self._stream = OutputStream(self._format)
        tokens = list(self._format.control_tokens)
        ids = tokenizer.convert_tokens_to_ids(tokens)
        unknown = getattr(tokenizer, "unk_token_id", None)
        if missing := [t for t, i in zip(tokens, ids, strict=True) if i is None or i == unknown]:
            raise ValueError(f"the format {self.tool_format} needs the token {missing[0]}, which this tokenizer lacks")

    def adjust_request(self, request: Any) -> Any:
        """Keep control tokens in the text, by which calls are found, and hold an answer that must call to the format.

        Raises:
            VLLMValidationError: status 400, if no grammar can be written for the tools.
        """
        if not _offers_tools(request):
            return request
        request.skip_special_tokens = False
        if request.tool_choice not in (None, "auto"):
            try:
                grammar = forced_grammar(
                    self._format,
                    [tool.model_dump(exclude_none=True) for tool in request.tools],
                    name=_forced_name(request.tool_choice),
                    parallel=request.parallel_tool_calls is not False,
                    thinking=_may_think(request),
                )
            except UserError as error:
                raise VLLMValidationError(f"tool_choice: {error}", parameter="tools") from None
            # As vLLM's own parsers do, in place of what the request says of its output's form.
            request.structured_outputs = StructuredOutputsParams(grammar=grammar)
            for field in ("response_format", "text"):  # of chat requests, of the Responses API
                if hasattr(request, field):
                    setattr(request, field, None)
        return request

    def extract_tool_calls(self, model_output: str, request: Any) -> ExtractedToolCallInformation:
        """The calls of a whole output."""
        if not _offers_tools(request):
            return ExtractedToolCallInformation(tools_called=False, tool_calls=[], content=model_output)
        piece = read_output(self._format, model_output)
        _log_fault(piece)
        calls = [
            ToolCall(id=call.id, function=FunctionCall(id=call.id, name=call.name, arguments=call.arguments))
            for call in piece.calls
        ]
        return ExtractedToolCallInformation(tools_called=bool(calls), tool_calls=calls, content=piece.content or None)

    def extract_tool_calls_streaming(
        self,
        previous_text: str,
        current_text: str,
        delta_text: str,
        previous_token_ids: Sequence[int],
        current_token_ids: Sequence[int],
        delta_token_ids: Sequence[int],
        request: Any,
    ) -> DeltaMessage | None:
        """What a piece of output makes certain."""
        if not _offers_tools(request):
            return DeltaMessage(content=delta_text) if delta_text else None
        return _message(self._stream.feed(delta_text))

    def finish_streaming(self) -> DeltaMessage | None:
        """What only the end of the output makes certain."""
        piece = self._stream.finish()
        _log_fault(piece)
        return _message(piece)


class PortlabGemma4ReasoningParser(Gemma4ParserReasoningAdapter):
    """vLLM's own for Gemma 4, which takes a `<channel|>` quoted in arguments for the end of a thought."""

    def extract_reasoning(self, model_output: str, request: Any) -> tuple[str | None, str | None]:
        """Thought and the rest of a whole output."""
        thought, rest = split_thought(model_output)
        if not thought:
            return None, model_output
        reasoning, _ = super().extract_reasoning(thought, request)
        return reasoning, rest or None


def _offers_tools(request: Any) -> bool:
    return bool(request.tools) and request.tool_choice != "none"


def _forced_name(choice: Any) -> str | None:
    """The tool that a `tool_choice` names: in a function in chat requests, by itself in the Responses API."""
    return getattr(choice, "function", choice).name if choice != "required" else None


def _may_think(request: Any) -> bool:
    return bool((getattr(request, "chat_template_kwargs", None) or {}).get("enable_thinking"))


def _message(piece: Piece) -> DeltaMessage | None:
    if not piece:
        return None
    return DeltaMessage(
        content=piece.content or None,
        reasoning=piece.reasoning or None,
        tool_calls=[
            DeltaToolCall(
                index=call.index,
                id=call.id,
                type="function",
                function=DeltaFunctionCall(name=call.name, arguments=call.arguments),
            )
            for call in piece.calls
        ],
    )


def _log_fault(piece: Piece) -> None:
    if piece.fault:
        logger.warning("Output is not all of it text and calls: %s", piece.fault)


for _format, _name in PARSER_NAMES.items():
    _parser = type(f"{_format.title().replace('-', '')}ToolParser", (PortlabToolParser,), {"tool_format": _format})
    ToolParserManager.register_module(_name, module=_parser)
ReasoningParserManager.register_module(REASONING_PARSER, module=PortlabGemma4ReasoningParser)
