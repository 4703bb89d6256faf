"""A tokenizer that needs no files: control tokens have ids from 0, any other character its code point + 100."""

from collections.abc import Sequence


class CharTokenizer:
    """See `portlab_spec.formats.segments.TextTokenizer`."""

    def __init__(self, controls: Sequence[str]) -> None:
        self.controls = controls

    def encode(self, text: str) -> list[int]:
        return [ord(c) + 100 for c in text]

    def token_id(self, token: str) -> int:
        return self.controls.index(token)

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(self.controls[i] if i < 100 else chr(i - 100) for i in ids)
