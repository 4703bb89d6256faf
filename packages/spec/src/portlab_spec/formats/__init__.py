"""Wire formats: how a conversation becomes tokens, and how a model's tokens become calls.

A format renders a `Conversation` to segments and parses model output back, from token ids first. Which tokens
carry loss follows from the segments, never from searching strings.
"""

import difflib

from portlab_spec.errors import UserError
from portlab_spec.formats import functiongemma, gemma3, qwen3
from portlab_spec.formats.gemma4 import REVISIONS, Gemma4
from portlab_spec.formats.segments import Delta, Encoded, Event, Format, Parsed, Segment, Stream, encode

_ALL: tuple[Format, ...] = (
    functiongemma.FORMAT,
    gemma3.JSON,
    gemma3.PYTHON,
    *(Gemma4(large=large, thinking=thinking) for large in (False, True) for thinking in (False, True)),
    qwen3.FORMAT,
)
FORMATS: dict[str, Format] = {fmt.name: fmt for fmt in _ALL}


def find_format(name: str) -> Format:
    """The format of a name; `gemma4...@COMMIT` is an earlier revision of the Gemma 4 template.

    Raises:
        UserError: no such format or revision; names those that exist.
    """
    base, _, revision = name.partition("@")
    found = FORMATS.get(base)
    if isinstance(found, Gemma4) and revision:
        if revision not in REVISIONS:
            raise UserError(f"no revision {revision!r} of gemma4", fix=f"Choose one of: {', '.join(REVISIONS)}")
        return Gemma4(revision, large=found.large, thinking=found.thinking)
    if found is None or revision:
        near = difflib.get_close_matches(base, FORMATS, n=1)
        hint = f"Did you mean {near[0]}? " if near else ""
        raise UserError(f"no format {name!r}", fix=f"{hint}Choose one of: {', '.join(FORMATS)}")
    return found


__all__ = [
    "FORMATS", "Delta", "Encoded", "Event", "Format", "Parsed", "Segment", "Stream", "encode", "find_format",
]  # fmt: skip
