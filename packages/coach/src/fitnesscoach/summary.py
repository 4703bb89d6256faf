"""What was recorded today, without any model."""

from pydantic import JsonValue
from rich.console import Group
from rich.table import Table

from fitnesscoach.providers import FitnessData
from fitnesscoach.tools import ToolResult, tool_set
from portlab_spec.conversation import ToolCall

# Label, tool of the basic set, key of its result, and how the value is written.
_ROWS = (
    ("Steps", "get_steps", "steps", "{:,}"),
    ("Daily step goal", "get_daily_step_goal", "goal_steps", "{:,}"),
    ("Goal reached", "get_step_goal_progress", "percent", "{:.1f} %"),
    ("Active time", "get_active_minutes", "minutes", ""),
    ("Sleep", "get_sleeping_minutes", "minutes", ""),
    ("Heart rate", "get_heart_rate", "beats_per_minute", "{} bpm"),
    ("Body battery", "get_body_battery_level", "level", "{} of 100"),
)


async def today(data: FitnessData) -> list[ToolResult]:
    """The results of the seven tools."""
    toolbox = tool_set("basic", data).toolbox
    return [await toolbox.run(ToolCall(name=name)) for _, name, _, _ in _ROWS]


def as_json(data: FitnessData, results: list[ToolResult]) -> dict[str, JsonValue]:
    """The results for a machine; null where there is none."""
    values = {result.call.name.removeprefix("get_"): _value(result, i) for i, result in enumerate(results)}
    missing: dict[str, JsonValue] = {r.call.name.removeprefix("get_"): r.error for r in results if r.error}
    return {"source": data.name, "now": data.now().isoformat(timespec="minutes"), **values, "missing": missing}


def as_table(data: FitnessData, results: list[ToolResult]) -> Group:
    """The results for a person."""
    table = Table(show_header=False)
    for i, result in enumerate(results):
        table.add_row(_ROWS[i][0], _shown(result, i) or f"[dim]{result.error}[/]")
    return Group(f"{data.now():%A, %d %B %Y, %H:%M} ({data.name})", table)


def recorded(results: list[ToolResult]) -> list[tuple[str, str]]:
    """What there is of the results: labels and values as text."""
    return [(_ROWS[i][0], text) for i, result in enumerate(results) if (text := _shown(result, i))]


def _shown(result: ToolResult, row: int) -> str:
    """A value as text; empty if there is none."""
    value, form = _value(result, row), _ROWS[row][3]
    if value is None:
        return ""
    return form.format(value) if form else _hours(int(str(value)))


def _value(result: ToolResult, row: int) -> JsonValue:
    return None if result.error else result.response[_ROWS[row][2]]


def _hours(minutes: int) -> str:
    return f"{minutes // 60} h {minutes % 60:02d} min"
