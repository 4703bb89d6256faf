"""The fitness coach's tools, and `fitness-213`: 213 questions with the one tool that answers each.

The functions are the source of the declarations; their bodies return sample values, and the example
application replaces them by its data provider. A model of 270M parameters tells the tools apart by the
docstrings alone, so these contrast steps walked, steps aimed for and the percentage between them; and they
are short, because every prompt of the data set repeats them.
"""

import json
from collections.abc import Callable
from functools import cache
from importlib import resources

from portlab_spec.conversation import Conversation, Message, Split, Tool, ToolCall
from portlab_spec.data.split import check_leakage, stratified_split
from portlab_spec.tools import tool_from_function

NAME = "fitness-213"
DEVELOPER_PROMPT = "You are a model that can do function calling with the following functions"
HELD_OUT_PER_TOOL: dict[Split, int] = {"test": 9, "validation": 4}
SPLIT_SEED = 0


def get_steps() -> int:
    """Get the number of steps walked so far today."""
    return 2400


def get_daily_step_goal() -> int:
    """Get the daily step goal: the target number of steps set for the day."""
    return 7640


def get_step_goal_progress() -> float:
    """Get the progress towards the step goal: the percentage of the goal reached so far."""
    return 31.41


def get_sleeping_minutes() -> int:
    """Get the minutes slept last night."""
    return 433


def get_active_minutes() -> int:
    """Get the minutes of physical activity and exercise today."""
    return 63


def get_heart_rate() -> int:
    """Get the current heart rate (pulse) in beats per minute."""
    return 62


def get_body_battery_level() -> int:
    """Get the body battery level: the energy left in the body, from 0 to 100."""
    return 69


FUNCTIONS: tuple[Callable[[], int | float], ...] = (
    get_steps,
    get_daily_step_goal,
    get_step_goal_progress,
    get_sleeping_minutes,
    get_active_minutes,
    get_heart_rate,
    get_body_battery_level,
)


@cache
def tools() -> tuple[Tool, ...]:
    """The seven tools, in the fixed order in which every prompt declares them."""
    return tuple(tool_from_function(function) for function in FUNCTIONS)


def load() -> list[Conversation]:
    """The 213 conversations: 122 train, 28 validation (4 per tool), 63 test (9 per tool).

    Each is developer prompt, question, and one call without arguments. The split depends on the ids alone.
    """
    text = resources.files("portlab_spec.data").joinpath("fitness_213.jsonl").read_text(encoding="utf-8")
    rows = [json.loads(line) for line in text.splitlines()]
    splits = stratified_split([row["id"] for row in rows], [row["tool"] for row in rows], HELD_OUT_PER_TOOL, SPLIT_SEED)
    conversations = [conversation(row["question"], row["tool"], id=row["id"], split=splits[row["id"]]) for row in rows]
    check_leakage(conversations)
    return conversations


def conversation(question: str, tool: str, *, id: str, split: Split) -> Conversation:
    """A question and the call that answers it, with all seven tools on offer."""
    return Conversation(
        id=id,
        split=split,
        source=NAME,
        tools=tools(),
        messages=(
            Message(role="developer", content=DEVELOPER_PROMPT),
            Message(role="user", content=question),
            Message(role="assistant", tool_calls=(ToolCall(name=tool),)),
        ),
    )
