"""Do our `args_ast` and BFCL's own AST checker agree? Both judge right answers and mutants of every row.

    nox -s bfcl_agreement               fetch the wheel, compare, write bench/results/bfcl_agreement.json
    python bench/bfcl_agreement.py --wheel WHEEL    with a wheel, or a folder it was unpacked to, that is there

The checker is run from the wheel as it is, on the questions and accepted answers as they are in the wheel. Only what it
looks up about models is replaced: whether dots in a tool's name were rewritten for the model (they were not).

Two kinds of case cannot be compared: BFCL's checker raises an exception; and, in the Java and JavaScript rows, where
BFCL reads source text and we read JSON, no source text stands for the value. Two differences are meant:

- first fit: BFCL gives each expected call the first call that fits and never takes it back, so that a right answer can
  fail for its order. We look for any way to pair them.
- bare value: in one row the value of an object's key stands there itself, where a list of accepted values belongs;
  BFCL then compares with its letters.

All four are counted by name; any other disagreement fails the run.
"""

import argparse
import json
import sys
import types
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import wheels
from bfcl_mutants import answers
from portlab_spec import cli
from portlab_spec.conversation import Conversation, ToolCall
from portlab_spec.data.bfcl import CALLS, BfclData, data_folder, read_bfcl
from portlab_spec.errors import EXIT_FAILED_CHECK
from portlab_spec.metrics import Prediction, accepted_of, judge, match_calls
from portlab_spec.tools import same_json
from result_file import write_result

REQUIREMENT = "bfcl-eval==2026.3.23"
LANGUAGES = {"simple_java": "java", "simple_javascript": "javascript"}


class NoSourceText(Exception):
    """No Java or JavaScript text that BFCL's converter reads as the value."""


@dataclass
class Tally:
    """Verdicts of one category, by what became of them."""

    agree: Counter[str] = field(default_factory=Counter)
    differ: Counter[str] = field(default_factory=Counter)
    excluded: Counter[str] = field(default_factory=Counter)
    right: int = 0
    examples: dict[str, str] = field(default_factory=dict)

    def figures(self) -> dict[str, Any]:
        """The tally as it is recorded."""
        agree, differ = self.agree.total(), self.differ.total()
        return {
            "compared": agree + differ,
            "agree": agree,
            "judged_right_by_both": self.right,
            "disagreements": dict(self.differ),
            "excluded": dict(self.excluded),
            "kinds": dict(self.agree),
        }


class BfclChecker:
    """The AST checker of the wheel.

    Args:
        wheel: a `bfcl-eval` wheel or the folder that it was unpacked to.
    """

    def __init__(self, wheel: Path) -> None:
        models = types.ModuleType("bfcl_eval.constants.model_config")
        # The real module imports the client of every model; the checker asks it one thing.
        models.MODEL_CONFIG_MAPPING = {"any": types.SimpleNamespace(underscore_to_dot=False)}  # type: ignore[attr-defined]
        sys.modules[models.__name__] = models
        sys.path.insert(0, str(wheel))
        try:
            from bfcl_eval.constants.enums import Language
            from bfcl_eval.eval_checker.ast_eval import ast_checker
        finally:
            sys.path.remove(str(wheel))
        self._check, self._language = ast_checker.ast_checker, Language
        self._readers: dict[str, Callable[..., Any]] = {
            "simple_java": ast_checker.java_type_converter,
            "simple_javascript": ast_checker.js_type_converter,
        }
        self._rows: dict[str, tuple[Any, Any]] = {}
        folder = data_folder(wheel)
        for category in CALLS:
            for name, sink in ((f"BFCL_v4_{category}.json", 0), (f"possible_answer/BFCL_v4_{category}.json", 1)):
                for line in folder.joinpath(name).read_text(encoding="utf-8").splitlines():
                    row = json.loads(line)
                    if sink == 0:
                        self._rows[row["id"]] = (row["function"], None)
                    else:
                        self._rows[row["id"]] = (self._rows[row["id"]][0], row["ground_truth"])

    def verdict(self, category: str, row_id: str, calls: Sequence[ToolCall]) -> bool:
        """Whether BFCL takes the calls as the answer to a row.

        Raises:
            NoSourceText: a value cannot be put to it.
            Exception: whatever the checker raises.
        """
        functions, truth = self._rows[row_id]
        output = [{call.name: self._arguments(category, functions, call)} for call in calls]
        language = self._language(LANGUAGES.get(category, "python"))
        return bool(self._check(functions, output, truth, language, category, "any")["valid"])

    def _arguments(self, category: str, functions: Sequence[Any], call: ToolCall) -> dict[str, Any]:
        if category not in LANGUAGES:
            return dict(call.arguments)
        properties = functions[0]["parameters"]["properties"]
        return {
            name: self._source_text(category, value, properties[name]) if name in properties else str(value)
            for name, value in call.arguments.items()
        }

    def _source_text(self, category: str, value: Any, schema: Mapping[str, Any]) -> str:
        nested = schema.get("items", {}).get("type")
        for text in source_texts(value):
            try:
                back = self._readers[category](text, schema["type"], nested)
            except (ValueError, NotImplementedError):
                continue
            if same_json(back, value):
                return text
        raise NoSourceText(f"{value!r} as {schema['type']}")


def source_texts(value: Any) -> Iterator[str]:
    """Ways to write a JSON value in Java or JavaScript."""
    match value:
        case str():
            yield value
            yield json.dumps(value)
        case bool():
            yield str(value).lower()
        case int():
            yield from (str(value), f"{value}L", f"{value}n")
        case float():
            yield from (repr(value), f"{value!r}f")
        case list():
            plain = ", ".join(map(str, value))
            typed = ", ".join(next(source_texts(item), "null") for item in value)
            quoted = ", ".join(map(json.dumps, value))
            long = ", ".join(f"{item}L" for item in value)
            for items in (plain, typed, quoted, long):
                yield f"new Object[]{{{items}}}"
                yield f"new ArrayList<>(Arrays.asList({items}))" if value else "new ArrayList<>()"
            yield json.dumps(value)
        case dict():
            puts = " ".join(f'put("{key}", {json.dumps(item)});' for key, item in value.items())
            yield f"new HashMap<String, Object>() {{{{ {puts} }}}}"
            yield json.dumps(value)


def compare(checker: BfclChecker, conversation: Conversation, tally: Tally) -> None:
    """Put every answer to one row to both checkers."""
    category = str(conversation.meta["category"])
    for kind, calls in answers(conversation):
        try:
            theirs = checker.verdict(category, conversation.id, calls)
        except NoSourceText:
            tally.excluded["no source text stands for the value"] += 1
            continue
        except Exception as error:
            tally.excluded[f"BFCL raises {type(error).__name__}"] += 1
            continue
        names = tuple(call.name for call in calls)
        ours = judge(conversation, Prediction(conversation.id, calls, None, True, names)).flags["args_ast"]
        if ours == theirs:
            tally.agree[kind] += 1
            tally.right += ours
        elif meant := meant_difference(conversation, calls, ours=ours):
            tally.excluded[f"meant: {meant}"] += 1
        else:
            name = f"{kind}: {'only we' if ours else 'only BFCL'} accept{'' if ours else 's'}"
            tally.differ[name] += 1
            given = [{call.name: call.arguments} for call in calls]
            tally.examples.setdefault(name, f"{conversation.id} {json.dumps(given, ensure_ascii=False)}")


def meant_difference(conversation: Conversation, calls: Sequence[ToolCall], *, ours: bool) -> str:
    """Name of the rule in which we differ on purpose, if it explains a disagreement; else empty."""
    accepted = accepted_of(conversation)
    values = [
        value for call in accepted for options in call.values() for option in options.values() for value in option
    ]
    if any(not isinstance(item, list) for value in values if isinstance(value, dict) for item in value.values()):
        return "bare value"
    return "first fit" if ours and not _first_fit(conversation, calls) else ""


def _first_fit(conversation: Conversation, calls: Sequence[ToolCall]) -> bool:
    left = list(calls)
    for expected in accepted_of(conversation):
        fit = next((call for call in left if match_calls([call], [expected], conversation.tools)), None)
        if fit is None:
            return False
        left.remove(fit)
    return not left


def agreement(wheel: Path, *, every: int = 1) -> tuple[dict[str, Tally], BfclData]:
    """Tallies by category, over every n-th row, and the data that were read."""
    checker, data = BfclChecker(wheel), read_bfcl(wheel, CALLS)
    tallies = {category: Tally() for category in CALLS}
    for conversation in data.conversations[::every]:
        compare(checker, conversation, tallies[str(conversation.meta["category"])])
    return tallies, data


def report(tallies: Mapping[str, Tally], data: BfclData) -> bool:
    """Print the table, write the result; whether every compared verdict agrees."""
    figures = {category: tally.figures() for category, tally in tallies.items()}
    print("| category | rows | not convertible | verdicts | agree | right by both | not compared |")
    print("|---|---:|---:|---:|---:|---:|---|")
    for category, f in figures.items():
        f["rows"] = data.rows[category]
        f["not_convertible"] = [f"{r.id}: {r.reason}" for r in data.rejects if r.category == category]
        excluded = ", ".join(f"{count} {name}" for name, count in f["excluded"].items())
        print(
            f"| {category} | {f['rows']} | {len(f['not_convertible'])} | {f['compared']:,} | {f['agree']:,} "
            f"| {f['judged_right_by_both']:,} | {excluded} |"
        )
    compared, agree = (sum(f[key] for f in figures.values()) for key in ("compared", "agree"))
    print(f"\n{agree:,} of {compared:,} verdicts agree")
    for category, tally in tallies.items():
        for name, count in tally.differ.items():
            print(f"{category}: {count} x {name}, for example {tally.examples[name]}")
    ratios = {"agree / compared": agree / compared}
    write_result("bfcl_agreement", ("portlab-spec",), figures, ratios, data=REQUIREMENT)
    return agree == compared


def main(args: list[str]) -> int:
    """Compare and report; 1 if a verdict differs without a name."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wheel", type=Path, help="a bfcl-eval wheel or unpacked folder; downloaded by default")
    wheel: Path | None = parser.parse_args(args).wheel
    return 0 if report(*agreement(wheel or wheels.wheel(REQUIREMENT))) else EXIT_FAILED_CHECK


if __name__ == "__main__":
    cli.run("bfcl_agreement", main)
