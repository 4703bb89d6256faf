"""A model folder run by transformers in this process (extra `folder`), in the wire formats of `portlab_spec`."""

import asyncio
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, StoppingCriteria, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer
from transformers.utils.logging import disable_progress_bar

from fitnesscoach.backends.protocol import Answer, BackendError, OnText
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
        format: name of the wire format; by the tokenizer's control tokens if empty.
        timeout: seconds for one answer, without waiting for one's turn.

    Raises:
        UserError: the folder is incomplete, or its format is unknown.
    """

    def __init__(
        self, folder: Path, *, name: str = "", format: str = "", timeout: float = 60.0, max_tokens: int = 256
    ) -> None:
        self.name = name or str(folder)
        tokenizer = Tokenizer.load(folder)
        self._format = find_format(format or detect_format(tokenizer, str(folder)))
        self._tokenizer = tokenizer.with_names_for(self._format.control_tokens)
        self._stops = [self._tokenizer.token_id(token) for token in self._format.stop_tokens]
        self._model = _load(folder)
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
        async with self._turn:
            try:
                async with asyncio.timeout(self._timeout):
                    ids = await self._generate(prompt, on_text)
            except TimeoutError:
                raise BackendError(f"{self.name}: no complete answer within {self._timeout:g} s") from None
            except (RuntimeError, ValueError) as error:  # out of memory, a prompt beyond the model's length
                raise BackendError(f"{self.name}: {' '.join(str(error).split())[:300]}") from None
        strict, lenient = (self._format.parse(ids, self._tokenizer, lenient=flag) for flag in (False, True))
        return Answer(strict, lenient, self._tokenizer.decode(prompt), self._tokenizer.decode(ids))

    async def close(self) -> None:
        """See `Backend`."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _generate(self, prompt: list[int], on_text: OnText) -> list[int]:
        """Ids after the prompt. Given up (timeout, Ctrl-C), the thread stops at its next token."""
        loop = asyncio.get_running_loop()
        queue: asyncio.Queue[int | None] = asyncio.Queue()
        stop = threading.Event()
        streamer = _Streamer(lambda token: loop.call_soon_threadsafe(queue.put_nowait, token))
        work = loop.run_in_executor(self._thread, self._run, prompt, streamer, stop)
        work.add_done_callback(lambda _: queue.put_nowait(None))
        ids: list[int] = []
        shown = _TextShown(self._format, self._tokenizer)
        try:
            while (token := await queue.get()) is not None:
                ids.append(token)
                if text := shown.add(ids):
                    await on_text(text)
            await work  # its error, if it had one
        finally:
            stop.set()
        return ids

    def _run(self, prompt: list[int], streamer: "_Streamer", stop: threading.Event) -> None:
        tokens = torch.tensor([prompt], device=self._model.device)
        with torch.inference_mode():
            self._model.generate(
                input_ids=tokens,
                attention_mask=torch.ones_like(tokens),
                do_sample=False,
                max_new_tokens=self._max_tokens,
                eos_token_id=self._stops,
                pad_token_id=self._stops[0],
                streamer=streamer,
                stopping_criteria=StoppingCriteriaList([_StopWhen(stop)]),
            )


def detect_format(tokenizer: Tokenizer, where: str) -> str:
    """Name of the format that a tokenizer's control tokens speak for.

    Raises:
        UserError: none of them.
    """
    for name, token in _MARKS:
        if tokenizer.knows([token]):
            return name
    raise UserError("the tokenizer has no control tokens of a known format", where=where, fix="Pass --format")


def _load(folder: Path) -> Any:
    if not sys.stderr.isatty():
        disable_progress_bar()
    on_gpu = torch.cuda.is_available()
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype="auto" if on_gpu else torch.float32, local_files_only=True
        )
    except (OSError, ValueError) as error:
        what = f"transformers cannot load the model ({' '.join(str(error).split())[:200]})"
        raise UserError(what, where=str(folder), fix="Choose a complete model folder") from None
    return model.to("cuda" if on_gpu else "cpu").eval()


class _Streamer(BaseStreamer):
    """Hands each generated token on; the first `put` is the prompt."""

    def __init__(self, put: Callable[[int], Any]) -> None:
        self._put, self._prompt_seen = put, False

    def put(self, value: torch.Tensor) -> None:
        if self._prompt_seen:
            for token in value.flatten().tolist():
                self._put(token)
        self._prompt_seen = True

    def end(self) -> None:
        """Nothing to do: the caller sees the thread end."""


class _StopWhen(StoppingCriteria):
    """Stops when an event is set."""

    def __init__(self, event: threading.Event) -> None:
        self._event = event

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return torch.full((input_ids.shape[0],), self._event.is_set(), device=input_ids.device, dtype=torch.bool)


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
