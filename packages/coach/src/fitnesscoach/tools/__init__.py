"""What the model may do: two sets of tools over one source of data.

toolbox.py      allow-list, schema check, timeout, result
basic.py        the seven of `fitness-213`: today, without arguments
plus.py         the reading ones of `fitness-plus`: dates, periods, metrics
"""

import datetime as dt
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from fitnesscoach.providers import FitnessData
from fitnesscoach.tools import basic, plus
from fitnesscoach.tools.toolbox import BadArgumentError, Capability, Response, Status, Toolbox, ToolResult, refused
from portlab_spec.data import fitness

Kind = Literal["basic", "plus"]


@dataclass(frozen=True)
class ToolSet:
    """Tools and the developer prompt that goes with them, as the data set of the same tools has them.

    Attributes:
        prompt: the text at a given time.
        examples: questions that the tools answer, for whoever does not know what to ask.
    """

    toolbox: Toolbox
    prompt: Callable[[dt.datetime], str]
    examples: tuple[str, ...]


def tool_set(kind: Kind, data: FitnessData) -> ToolSet:
    """One of the two sets over a source of data."""
    if kind == "basic":
        return ToolSet(basic.toolbox(data), lambda _: fitness.DEVELOPER_PROMPT, basic.EXAMPLES)
    return ToolSet(plus.toolbox(data), dated_prompt, plus.EXAMPLES)


def dated_prompt(now: dt.datetime) -> str:
    """The developer prompt with the date that expressions such as "last Monday" are relative to."""
    return f"{fitness.DEVELOPER_PROMPT}. Today is {now:%A}, {now.day} {now:%B %Y}, {now:%H:%M}."


__all__ = [
    "BadArgumentError", "Capability", "Kind", "Response", "Status", "ToolResult", "ToolSet", "Toolbox", "dated_prompt",
    "refused", "tool_set",
]  # fmt: skip
