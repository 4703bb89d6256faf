"""A model folder in this process, in the wire formats of `portlab_spec`; `runtimes.py` says who runs it."""

import asyncio
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from fitnesscoach.backends.protocol import Answer, BackendError, OnText
from fitnesscoach.backends.runtimes import Runtime, load_decoder
from portlab_spec.conversation import Conversation, Message, Tool
from portlab_spec.errors import UserError
from portlab_spec.formats import Delta, Format, encode, find_format
from portlab_spec.tokenizer import Tokenizer

# The format that a tokenizer's control tokens speak for, the first that fits.
_MARKS = (
    ("functiongemma", "<start_function_call>"),
    ("gemma4", "<|tool_call>"),
    ("qwen3", "<|im_start|>"),
    ("gemma3-json", "<start_of_turn>"),
)


class Folder:
    """A model on this machine, see `Backend`. It answers one question at a time; others wait.

    Args:
        folder: config, tokenizer and weights.
        runtime: who runs it; by default the first that is installed and knows the model.
        format: name of the wire format; by the tokenizer's control tokens if empty.
        timeout: seconds for one answer, without compiling and without waiting for one's turn.
        max_tokens: most tokens of an answer.

    Raises:
        UserError: the folder is incomplete, its format is unknown, or nothing that is installed runs the model.
    """

    def __init__(
        self,
        folder: Path,
        *,
        name: str = "",
        runtime: Runtime | None = None,
        format: str = "",
        timeout: float = 60.0,
        max_tokens: int = 256,
    ) -> None:
        self.name = name or str(folder)
        tokenizer = Tokenizer.load(folder)
        self._format = find_format(format or detect_format(tokenizer, str(folder)))
        self._tokenizer = tokenizer.with_names_for(self._format.control_tokens)
        self._stops = {self._tokenizer.token_id(token) for token in self._format.stop_tokens}
        self._decoder = load_decoder(folder, runtime)
        self._timeout, self._max_tokens = timeout, max_tokens
        self._turn = asyncio.Lock()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="model")

    async def answer(self, messages: Sequence[Message], tools: Sequence[Tool], on_text: OnText) -> Answer:
        """See `Backend`."""
        conversation = Conversation(id="chat", tools=tuple(tools), messages=tuple(messages))
        try:
            prompt = encode(self._format.render(conversation, generation_prompt=True), self._tokenizer).ids
        except UserError as error:
            raise BackendError(str(error)) from None
        limit = min(self._max_tokens, self._decoder.positions - len(prompt))
        if limit < 1:
            what = f"the conversation has {len(prompt):,} tokens, the model {self._decoder.positions:,} positions"
            raise BackendError(f"{self.name}: {what}. Start a new one")
        async with self._turn:
            try:
                ids = await self._generate(prompt, limit, on_text)
            except TimeoutError:
                raise BackendError(f"{self.name}: no complete answer within {self._timeout:g} s") from None
            except (RuntimeError, ValueError) as error:  # out of memory
                raise BackendError(f"{self.name}: {' '.join(str(error).split())[:300]}") from None
        strict, lenient = (self._format.parse(ids, self._tokenizer, lenient=flag) for flag in (False, True))
        return Answer(strict, lenient, self._tokenizer.decode(prompt), self._tokenizer.decode(ids))

    async def close(self) -> None:
        """See `Backend`."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        del self._decoder

    async def _generate(self, prompt: list[int], limit: int, on_text: OnText) -> list[int]:
        """Ids after the prompt. Given up (timeout, Ctrl-C), the thread stops at its next token."""
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._thread, self._decoder.prepare, len(prompt), limit)
        queue: asyncio.Queue[int | None] = asyncio.Queue()
        stop = threading.Event()
        ids: list[int] = []
        shown = _TextShown(self._format, self._tokenizer)

        def put(token: int) -> None:
            loop.call_soon_threadsafe(queue.put_nowait, token)

        async with asyncio.timeout(self._timeout):
            work = loop.run_in_executor(self._thread, self._run, prompt, limit, put, stop)
            work.add_done_callback(lambda _: queue.put_nowait(None))
            try:
                while (token := await queue.get()) is not None:
                    ids.append(token)
                    if text := shown.add(ids):
                        await on_text(text)
                await work  # its error, if it had one
            finally:
                stop.set()
        return ids

    def _run(self, prompt: list[int], limit: int, put: Callable[[int], object], stop: threading.Event) -> None:
        for token in self._decoder.decode(prompt, self._stops, limit):
            if stop.is_set():
                return
            put(token)


def detect_format(tokenizer: Tokenizer, where: str) -> str:
    """Name of the format that a tokenizer's control tokens speak for.

    Raises:
        UserError: none of them.
    """
    for name, token in _MARKS:
        if tokenizer.knows([token]):
            return name
    raise UserError("the tokenizer has no control tokens of a known format", where=where, fix="Pass --format")


class _TextShown:
    """What of a growing output is text for the user: no calls, no control tokens."""

    def __init__(self, fmt: Format, tokenizer: Tokenizer) -> None:
        self._stream, self._tokenizer, self._fed = fmt.stream(), tokenizer, 0

    def add(self, ids: Sequence[int]) -> str:
        """New text, once all ids so far decode to whole characters."""
        text = self._tokenizer.decode(ids)
        if text.endswith("\ufffd"):
            return ""
        events = self._stream.feed(text[self._fed :])
        self._fed = len(text)
        return "".join(event.text for event in events if isinstance(event, Delta) and event.kind == "text")
