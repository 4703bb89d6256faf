"""Wire formats: how a conversation becomes tokens, and how a model's tokens become calls.

A format renders a `Conversation` to segments and parses model output back, from token ids first. Which tokens
carry loss follows from the segments, never from searching strings.
"""

from portlab_spec.formats import functiongemma
from portlab_spec.formats.segments import Encoded, Format, Parsed, Segment, encode

FORMATS: dict[str, Format] = {"functiongemma": functiongemma.FORMAT}

__all__ = ["FORMATS", "Encoded", "Format", "Parsed", "Segment", "encode"]
