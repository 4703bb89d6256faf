"""`fitness-plus`: conversations made from the grammar, reproducible from a seed.

The plan says how many rows of each kind each tool gets in each split; every row has its own random generator, seeded
by its id. A draw is thrown away, and drawn again, if it makes no sense or says what another row says already.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date, datetime, timedelta
from functools import cache
from random import Random
from typing import Any

from pydantic import JsonValue

from portlab_spec.conversation import Conversation, Message, Split, Tool, ToolCall
from portlab_spec.data.fitness_plus import NAME, dates
from portlab_spec.data.fitness_plus.functions import FUNCTIONS, GROUPS, call, tools
from portlab_spec.data.fitness_plus.grammar import Phrasing, Said, choose, dialogue, fill, join, pick, say, styled
from portlab_spec.data.split import check_leakage, normalise

PROMPT = "You are a model that can do function calling with the following functions"

# A share of the rows agrees in everything before the question, as the requests of one deployed application do:
FIXED_NOW = datetime(2026, 5, 13, 18, 20)
FIXED_TOOLS = (
    "get_steps", "get_metric_history", "get_goal_progress", "get_heart_rate", "get_sleep", "list_workouts",
    "log_workout", "log_water", "set_alarm", "set_reminder", "set_goal", "get_weather",
)  # fmt: skip
FIXED_SHARE = 0.6  # of the rows that need none but these tools

_GROUP = {f.__name__: number for number, group in enumerate(GROUPS) for f in group}
_SPEED_KMH = {"running": (6, 18), "cycling": (12, 38), "swimming": (1.2, 5), "walking": (3, 7.5), "hiking": (2, 6.5),
              "rowing": (6, 16)}  # fmt: skip
_ATTEMPTS = 500


@dataclass
class Draft:
    """A conversation in the making."""

    messages: list[Message] = field(default_factory=list)
    said: list[Said] = field(default_factory=list)

    def user(self, said: Said, rng: Random) -> None:
        """Add what the user says."""
        said = styled(said, rng, first=not self.said)
        self.said.append(said)
        self.messages.append(Message(role="user", content=said.text))

    def assistant(self, *calls: ToolCall, text: str | None = None) -> None:
        """Add calls, or text."""
        self.messages.append(Message(role="assistant", tool_calls=calls, content=text))

    def results(self, rng: Random) -> None:
        """Add the results of the last message's calls, as objects or as JSON text, and the answer made from them."""
        calls, structured, answers = self.messages[-1].tool_calls, rng.random() < 0.5, []
        for made in calls:
            result = call(made.name, made.arguments)
            text = None if structured else json.dumps(result)
            self.messages.append(
                Message(role="tool", name=made.name, content=text, response=result if structured else None)
            )
            template = rng.choice(dialogue()["answers"][made.name])
            answers.append(template.format(**_readable({**made.arguments, **result})))
        self.assistant(text=" ".join(answers))

    @property
    def calls(self) -> list[ToolCall]:
        """All calls, in order."""
        return [made for message in self.messages for made in message.tool_calls]

    @property
    def phrasings(self) -> list[str]:
        """Ids of the phrasings that the user's turns were made of, in order."""
        return [name for said in self.said for name in said.phrasings]


@dataclass(frozen=True)
class Scene:
    """What a draft is drawn from."""

    tool: str
    split: Split
    held_out: bool
    now: datetime
    partners: Sequence[str]
    rng: Random

    def pick(self, name: str) -> Phrasing:
        """A phrasing of a list that this row may use."""
        return pick(name, self.split, self.held_out, self.rng)

    def say(self, name: str) -> Said:
        """A filled phrasing of a list."""
        return say(self.pick(name), self.now, self.rng)

    def ask(self, tool: str) -> tuple[Said, ToolCall]:
        """A question and the call that it asks for."""
        said = self.say(tool)
        return said, ToolCall(name=tool, arguments=dict(said.arguments))


def _readable(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values as people write them: `4 May` for a date, `on` and `off`, no underscores."""
    out: dict[str, Any] = {}
    for key, value in values.items():
        out[key] = value
        if isinstance(value, bool):
            out[key] = "on" if value else "off"
        elif isinstance(value, str):
            try:
                day = date.fromisoformat(value)
                out[key] = f"{dates.day_and_month(day)} {day.year}" if key == "set_on" else dates.day_and_month(day)
            except ValueError:
                out[key] = value.replace("_", " ")
    return out


# ------------------------------------------------------------------------------------------------ kinds of row


def _single(scene: Scene, draft: Draft) -> None:
    said, wanted = scene.ask(scene.tool)
    draft.user(said, scene.rng)
    draft.assistant(wanted)


def _parallel(scene: Scene, draft: Draft) -> None:
    """Two or three questions in one message."""
    others = [name for name in scene.partners if name != scene.tool]
    count = 2 if scene.rng.random() < 0.75 else 3
    names = [scene.tool, *scene.rng.sample(others, count - 1)]
    asked = [scene.ask(name) for name in names]
    joiner = scene.pick("joiners" if count == 2 else "joiners_of_three")
    draft.user(join(joiner, [said for said, _ in asked]), scene.rng)
    draft.assistant(*(wanted for _, wanted in asked))


def _same_tool(scene: Scene, draft: Draft) -> None:
    """One tool called two or three times for different values of one slot."""
    phrasing = scene.pick(f"same_tool.{scene.tool}")
    slot = dialogue()["same_tool"][scene.tool]["slot"]
    several = [name for name in ("a", "b", "c") if name in phrasing.slots]
    chosen = {name: choose(slot, scene.now, scene.rng) for name in several}
    shared = {name: choose(name, scene.now, scene.rng) for name in phrasing.slots if name not in several}
    draft.user(fill(phrasing, chosen | shared, scene.rng), scene.rng)
    common = {key: value for filling in shared.values() for key, value in filling.arguments}
    draft.assistant(*(ToolCall(name=scene.tool, arguments=common | dict(chosen[n].arguments)) for n in several))


def _result(scene: Scene, draft: Draft) -> None:
    (_parallel if scene.rng.random() < 0.2 else _single)(scene, draft)
    draft.results(scene.rng)


def _follow_up(scene: Scene, draft: Draft) -> None:
    _single(scene, draft)
    draft.results(scene.rng)
    slot = scene.rng.choice(dialogue()["follow_up_slots"][scene.tool])
    more = scene.say(f"follow_up.{slot}")
    draft.user(more, scene.rng)
    before = draft.calls[0].arguments
    draft.assistant(ToolCall(name=scene.tool, arguments={**before, **more.arguments}))
    if scene.rng.random() < 0.4:
        draft.results(scene.rng)


def _clarify(scene: Scene, draft: Draft) -> None:
    asked, reply = scene.say(f"ask.{scene.tool}"), scene.say(f"reply.{scene.tool}")
    draft.user(asked, scene.rng)
    draft.assistant(text=scene.rng.choice(dialogue()["clarifications"][scene.tool]["questions"]))
    draft.user(reply, scene.rng)
    draft.assistant(ToolCall(name=scene.tool, arguments={**asked.arguments, **reply.arguments}))
    if scene.rng.random() < 0.3:
        draft.results(scene.rng)


def _outside(scene: Scene, draft: Draft) -> None:
    phrasing = scene.pick("outside")
    fillers = dialogue()["fillers"]
    text = phrasing.text.format(**{slot: scene.rng.choice(fillers[slot]) for slot in phrasing.slots})
    draft.user(Said(text, (text,), {}, (phrasing.id,)), scene.rng)
    draft.assistant(text=scene.rng.choice(dialogue()["refusals"]))


def _not_offered(scene: Scene, draft: Draft) -> None:
    draft.user(scene.say(scene.tool), scene.rng)
    draft.assistant(text=scene.rng.choice(dialogue()["refusals"]))


@dataclass(frozen=True)
class Kind:
    """A kind of row: how to draft it, the tools it is made for, and how many rows each of these gets."""

    draft: Callable[[Scene, Draft], None]
    tools: Sequence[str]
    rows: int


@cache
def kinds() -> dict[str, Kind]:
    """The kinds of row by name, as `meta["kind"]` has it."""
    every, talk = list(FUNCTIONS), dialogue()
    return {
        "single": Kind(_single, every, 44),
        "parallel": Kind(_parallel, every, 14),
        "same_tool": Kind(_same_tool, list(talk["same_tool"]), 12),
        "result": Kind(_result, every, 12),
        "follow_up": Kind(_follow_up, list(talk["follow_up_slots"]), 18),
        "clarify": Kind(_clarify, list(talk["clarifications"]), 20),
        "not_offered": Kind(_not_offered, every, 5),
        "outside": Kind(_outside, [""], 200),
    }


# ------------------------------------------------------------------------------------------------ rows


@dataclass(frozen=True)
class _Plan:
    """A row to be made."""

    id: str
    kind: str
    tool: str
    split: Split
    held_out: bool


def _plans() -> Iterator[_Plan]:
    """All rows: of each kind and tool, a fifth is for the test and a tenth for validation; half of the test rows are to
    use held-out phrasings."""
    for name, kind in kinds().items():
        for tool in kind.tools:
            rows = 13 if (name, tool) == ("single", "get_recovery_time") else kind.rows  # it has no arguments to vary
            tests = round(rows / 5)
            # Small cells take turns, so that a tenth of them all is a tenth of the rows.
            validations = (rows + list(FUNCTIONS).index(tool) % 10) // 10 if tool else rows // 10
            for number in range(rows):
                split: Split = "train"
                if number < tests + validations:
                    split = "test" if number < tests else "validation"
                row_id = f"{name}-{tool}-{number:03d}" if tool else f"{name}-{number:03d}"
                yield _Plan(row_id, name, tool, split, split == "test" and number < (tests + 1) // 2)


@cache
def conversations(seed: int = 0) -> tuple[Conversation, ...]:
    """All conversations of a seed, test rows first within each kind and tool.

    Raises:
        RuntimeError: the grammar is too small for the plan; names the row.
    """
    owner: dict[str, Split] = {}  # of everything that users say: no sentence stands in two splits
    asked: set[tuple[str, ...]] = set()
    drafts = []
    for plan in _plans():
        rng = Random(f"{seed}:{plan.id}")
        for _ in range(_ATTEMPTS):
            fixed, scene, draft = _draft(plan, rng)
            sentences = [normalise(sentence) for said in draft.said for sentence in said.sentences]
            whole = (plan.kind, *sentences)
            if whole in asked or any(owner.get(sentence, plan.split) != plan.split for sentence in sentences):
                continue
            if all(map(_sensible, draft.calls)) and _moves_on(draft):
                break
        else:
            raise RuntimeError(f"{plan.id}: no new wording in {_ATTEMPTS} draws")
        asked.add(whole)
        owner |= dict.fromkeys(sentences, plan.split)
        drafts.append((plan, fixed, scene, draft))
    trained = {name for plan, _, _, draft in drafts if plan.split == "train" for name in draft.phrasings}
    made = tuple(_conversation(*parts, trained) for parts in drafts)
    check_leakage(made, where=NAME)
    return made


@cache
def _moments() -> list[datetime]:
    """Moments of other rows: few, because the expressions of time are listed once for each."""
    rng = Random("moments")
    first = datetime(2025, 3, 1)
    spread = [first + timedelta(days=rng.randrange(900)) for _ in range(84)]
    return [day.replace(hour=rng.randrange(7, 22), minute=5 * rng.randrange(12)) for day in spread]


def _draft(plan: _Plan, rng: Random) -> tuple[bool, Scene, Draft]:
    fixed = (plan.tool in FIXED_TOOLS and plan.kind != "not_offered") or plan.kind == "outside"
    fixed = fixed and rng.random() < FIXED_SHARE
    now = FIXED_NOW if fixed else rng.choice(_moments())
    partners = FIXED_TOOLS if fixed else tuple(FUNCTIONS)
    scene = Scene(plan.tool, plan.split, plan.held_out, now, partners, rng)
    draft = Draft()
    kinds()[plan.kind].draft(scene, draft)
    return fixed, scene, draft


def _moves_on(draft: Draft) -> bool:
    """Does every call ask for something new?"""
    calls = [json.dumps([made.name, made.arguments], sort_keys=True) for made in draft.calls]
    return len(set(calls)) == len(calls)


def _sensible(made: ToolCall) -> bool:
    """Could a person mean this call? No marathon in ten minutes, no distance in yoga, no periods that overlap."""
    arguments: dict[str, Any] = dict(made.arguments)
    sport, km = arguments.get("sport"), arguments.get("distance_km", arguments.get("min_distance_km"))
    if sport and km:
        if sport not in _SPEED_KMH or (sport == "swimming" and km > 5):
            return False
        low, high = _SPEED_KMH[sport]
        if "duration_min" in arguments and not low <= 60 * km / arguments["duration_min"] <= high:
            return False
    if made.name == "compare_periods":
        first, second = ((arguments[f"{which}_start"], arguments[f"{which}_end"]) for which in ("first", "second"))
        return bool(first[1] < second[0] or second[1] < first[0])
    return True


def _conversation(plan: _Plan, fixed: bool, scene: Scene, draft: Draft, trained: set[str]) -> Conversation:
    meta: dict[str, JsonValue] = {
        "kind": plan.kind,
        "unseen_phrasing": not trained.intersection(draft.phrasings),
        "phrasings": list(draft.phrasings),
        "offer": "fixed" if fixed else "drawn",
        "now": scene.now.isoformat(timespec="minutes"),
    }
    return Conversation(
        id=plan.id,
        split=plan.split,
        source=NAME,
        tools=_offer(plan, fixed, draft, scene.rng),
        messages=(Message(role="developer", content=_prompt(scene.now, fixed, scene.rng)), *draft.messages),
        meta=meta,
    )


def _prompt(now: datetime, fixed: bool, rng: Random) -> str:
    weekday = dates.WEEKDAYS[now.weekday()]
    if fixed or rng.random() < 0.5:
        return f"{PROMPT}. Today is {weekday}, {dates.day_and_month(now.date())} {now.year}, {now:%H:%M}."
    return f"{PROMPT}\nCurrent date and time: {now:%Y-%m-%dT%H:%M}\nDay of the week: {weekday}"


def _offer(plan: _Plan, fixed: bool, draft: Draft, rng: Random) -> tuple[Tool, ...]:
    """The tools on offer: 6 to 12, those that are called among them, and some that resemble them."""
    by_name = {tool.name: tool for tool in tools()}
    if fixed:
        return tuple(by_name[name] for name in FIXED_TOOLS)
    called = list(dict.fromkeys(made.name for made in draft.calls))
    others = [name for name in FUNCTIONS if name not in called]
    if plan.kind == "not_offered":
        # The histories of the first group also hold pulse and sleep, so that both groups have to go.
        groups = {0, 1} if _GROUP[plan.tool] in (0, 1) else {_GROUP[plan.tool]}
        others = [name for name in others if _GROUP[name] not in groups]
    similar = [name for name in others if _GROUP[name] in {_GROUP[c] for c in called}]
    names = [*called, *rng.sample(similar, min(3, len(similar)))]
    rest = [name for name in others if name not in names]
    names += rng.sample(rest, max(0, rng.randint(6, 12) - len(names)))
    order = list(FUNCTIONS)
    names.sort(key=order.index)
    if rng.random() < 0.5:
        rng.shuffle(names)
    return tuple(by_name[name] for name in names)
