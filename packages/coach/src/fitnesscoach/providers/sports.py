"""One name for each sport, whatever watches, apps and file formats call it."""

import re

# What a source's name holds, and the sport it then is; the first that fits.
_PATTERNS = (
    ("run", "running"),
    ("bik", "cycling"),
    ("cycl", "cycling"),
    ("ride", "cycling"),
    ("swim", "swimming"),
    ("hik", "hiking"),
    ("walk", "walking"),
    ("row", "rowing"),
    ("yoga", "yoga"),
    ("strength", "strength"),
)


def sport_name(text: object) -> str:
    """The sport, by the names of `fitness-plus`; another one in plain letters, `other` if there is none."""
    name = re.sub(r"[^a-z]+", " ", str(text or "").lower()).strip()[:30]
    return next((sport for part, sport in _PATTERNS if part in name), name or "other")
