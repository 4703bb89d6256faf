"""Text to token ids and back, for any `tokenizer.json`."""

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Self

import tokenizers

from portlab_spec.errors import UserError

TOKENIZER_FILE = "tokenizer.json"

# Source: google/functiongemma-270m-it. In the stock Gemma 3 tokenizer these ids are <unused40> .. <unused46>.
FUNCTION_TOKENS: dict[str, int] = {
    "<start_function_declaration>": 46,
    "<end_function_declaration>": 47,
    "<start_function_call>": 48,
    "<end_function_call>": 49,
    "<start_function_response>": 50,
    "<end_function_response>": 51,
    "<escape>": 52,
}

# Source: google/gemma-4-E2B-it. The vocabularies of Gemma 3 and 4 agree but for the names of reserved tokens.
GEMMA4_TOKENS: dict[str, int] = {
    "<|tool>": 46,
    "<tool|>": 47,
    "<|tool_call>": 48,
    "<tool_call|>": 49,
    "<|tool_response>": 50,
    "<tool_response|>": 51,
    '<|"|>': 52,
    "<|think|>": 98,
    "<|channel>": 100,
    "<channel|>": 101,
    "<|turn>": 105,
    "<turn|>": 106,
}

# Source: Qwen/Qwen3-0.6B. What the format `qwen3` is made of.
QWEN3_TOKENS: dict[str, int] = {
    "<|endoftext|>": 151643,
    "<|im_start|>": 151644,
    "<|im_end|>": 151645,
    "<tool_call>": 151657,
    "</tool_call>": 151658,
    "<tool_response>": 151665,
    "</tool_response>": 151666,
    "<think>": 151667,
    "</think>": 151668,
}


class Tokenizer:
    """A tokenizer whose `encode` adds nothing and whose `decode` drops nothing."""

    def __init__(self, backend: tokenizers.Tokenizer, where: str = "tokenizer") -> None:
        self.backend, self._where = backend, where

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Read `tokenizer.json` of a model folder.

        Raises:
            UserError: missing or damaged.
        """
        path = folder / TOKENIZER_FILE
        if not path.is_file():
            raise UserError(f"holds no {TOKENIZER_FILE}", where=str(folder), fix="Choose a complete model folder")
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the tokenizers library raises bare Exception for any fault of the file
            raise UserError(f"cannot be read ({error})", where=str(path), fix="Restore the file") from None
        return cls(backend, str(path))

    def knows(self, tokens: Iterable[str]) -> bool:
        """Whether each of the tokens has an id of its own."""
        return all(self.backend.token_to_id(token) is not None for token in tokens)

    def renamed(self, names: Mapping[str, int]) -> "Tokenizer":
        """A tokenizer whose added tokens have other names.

        Makes a Gemma 4 tokenizer (`GEMMA4_TOKENS`) of a Gemma 3 one, for work without a download.

        Args:
            names: new name of each id; all must be added tokens.

        Raises:
            UserError: an id is no added token.
        """
        state = json.loads(self.backend.to_str())
        added = {token["id"]: token for token in state["added_tokens"]}
        vocabulary: dict[str, int] = state["model"]["vocab"]
        for name, index in names.items():
            if index not in added:
                raise UserError(f"id {index} is no added token", where=self._where, fix="Use a Gemma tokenizer")
            vocabulary.pop(added[index]["content"], None)
            added[index]["content"] = name
            vocabulary[name] = index
        return Tokenizer(tokenizers.Tokenizer.from_str(json.dumps(state)), self._where)

    def with_names_for(self, control_tokens: Collection[str]) -> "Tokenizer":
        """This tokenizer, under Gemma 4's names if a format's control tokens are those and it does not know them."""
        if self.knows(control_tokens) or GEMMA4_TOKENS.keys().isdisjoint(control_tokens):
            return self
        return self.renamed(GEMMA4_TOKENS)

    @cached_property
    def bos_id(self) -> int:
        """Id of `<bos>`, with which every Gemma sequence starts.

        Raises:
            UserError: the tokenizer lacks it, as Qwen's does.
        """
        return self.token_id("<bos>")

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included."""
        return self.backend.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str) -> list[int]:
        """Ids of a text, with no `<bos>`. Control tokens spelt out in the text become their single id."""
        return self.backend.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, control tokens included."""
        return self.backend.decode(list(ids), skip_special_tokens=False)

    def token_id(self, token: str) -> int:
        """Id of exactly one token.

        Raises:
            UserError: the tokenizer lacks it.
        """
        found = self.backend.token_to_id(token)
        if found is None:
            raise UserError(f"has no token {token}", where=self._where, fix=_who_has(token))
        return found


def _who_has(token: str) -> str:
    if token in FUNCTION_TOKENS:
        return "Use google/functiongemma-270m-it or the default model, or another tool-call format"
    if token in QWEN3_TOKENS:
        return "Use a Qwen3 model, or another tool-call format"
    if token.startswith("<|") or token.endswith("|>"):
        return "Use a Gemma 4 model, or another tool-call format"
    return "Use a Gemma model"
