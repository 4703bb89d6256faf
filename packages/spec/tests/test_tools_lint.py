"""The linter's claims, each held against Gemma 4's five published chat templates.

A tool is rendered by the template and its declaration is read back by a strict parser of the format's grammar. What
comes back must be the tool, exactly where the linter finds nothing that a template drops or mangles.
"""

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from portlab_spec.conversation import Conversation, Message, Tool
from portlab_spec.errors import UserError
from portlab_spec.formats import find_format
from portlab_spec.tools import describe_constraints, lint, lint_tools

# Commits of google/gemma-4-E2B-it, and the files in which trl ships their templates.
TEMPLATE_FILES = {
    "4742fe8": "gemma4_v2",
    "b446025": "gemma4_v3",
    "6b7e72c": "gemma4",
    "905e84b": "gemma4_v4",
    "8995379": "gemma4_v5",
}
EVERY = set(TEMPLATE_FILES)
EARLY = {"4742fe8", "b446025"}
NATIVE_FORMATS = ("functiongemma", *(f"gemma4@{commit}" for commit in TEMPLATE_FILES))
D = {"description": "Text."}


def tool(parameters: dict[str, Any], name: str = "f", description: str = "Do it.") -> Tool:
    return Tool(name=name, description=description, parameters=parameters)


def with_x(schema: dict[str, Any], **keys: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"x": schema}, **keys}


def list_of(items: dict[str, Any]) -> dict[str, Any]:
    return with_x({"type": "array", "items": items, **D})


# code -> parameters -> revisions of Gemma 4 whose rendering is not the schema.
TEXT = {"type": "string"}
CASES: list[tuple[str, dict[str, Any], set[str]]] = [
    ("type-list", with_x({"type": ["string", "null"], **D}), EVERY),
    ("union", with_x({"anyOf": [TEXT, {"type": "integer"}], **D}), EVERY),
    ("union", list_of({"anyOf": [TEXT, {"type": "integer"}]}), EVERY),
    ("reference", with_x({"$ref": "#/$defs/A", **D}), EVERY),
    ("no-type", with_x({**D}), EVERY),
    ("parameters-type", {"properties": {"x": {**TEXT, **D}}}, EVERY),
    ("enum-not-string", with_x({"type": "integer", "enum": [1, 2], **D}), EVERY),
    ("enum-not-string", list_of({"type": "object", "enum": [{"a": 1}], "properties": {}}), EVERY),
    ("enum-member", with_x({**TEXT, "enum": ["a", None], **D}), EVERY - {"8995379"}),
    ("default", with_x({"type": "integer", "default": 5, **D}), EVERY),
    ("constraint", with_x({"type": "integer", "minimum": 1, **D}), EVERY),
    ("constraint", with_x({**TEXT, "pattern": "^a+$", **D}), EVERY),
    ("constraint", with_x({**TEXT, "format": "date", **D}), EVERY),
    ("keyword", with_x({**TEXT, "examples": ["a"], **D}), EVERY),
    ("keyword", with_x({**TEXT, **D}, description="About the arguments."), EVERY),
    ("items-keyword", list_of({**TEXT, "x-unit": {"kind": "metre"}}), EVERY),
    ("prefix-items", with_x({"type": "array", "prefixItems": [TEXT], "items": TEXT, **D}), EVERY),
    ("additional-properties", with_x({"type": "object", "additionalProperties": TEXT, **D}), EVERY),
    ("additional-properties", with_x({**TEXT, **D}, additionalProperties=True), EVERY),
    ("additional-properties", list_of({"type": "object", "properties": {}, "additionalProperties": TEXT}), EVERY),
    ("fake-property", with_x({"type": "object", "minProperties": 1, **D}), EVERY),
    ("array-of-arrays", list_of({"type": "array", "items": TEXT}), EVERY),
    ("reserved-name", with_x({**TEXT, **D}) | {"properties": {"type": {**TEXT, **D}}}, EARLY),
    ("reserved-name", with_x({"type": "object", "properties": {"required": {**TEXT, **D}}, **D}), EARLY),
    ("no-description-commas", with_x({"type": "array", "items": TEXT}), {"4742fe8"}),
    ("no-description-commas", with_x({"type": "object", "properties": {"a": {**TEXT, **D}}}), {"4742fe8"}),
    ("control-token", with_x({**TEXT, "description": 'Say <|"|>.'}), EVERY),
    ("parameter-name", {"type": "object", "properties": {"my key": {**TEXT, **D}}}, EVERY),
    # Rendered whole, but not as well as it could be.
    ("no-description", with_x(TEXT), set()),
    ("items-missing", with_x({"type": "array", **D}), set()),
    ("object-without-properties", with_x({"type": "object", **D}), set()),
    ("object-without-properties", list_of({"type": "object"}), set()),
    ("type-unknown", with_x({"type": "dict", **D}), set()),
    ("parameter-name", {"type": "object", "properties": {"my-key": {**TEXT, **D}}}, set()),
    ("required-unknown", with_x({**TEXT, **D}, required=["y"]), set()),
    ("case-collision", {"type": "object", "properties": {"b": {**TEXT, **D}, "B": {**TEXT, **D}}}, set()),
    ("long-description", with_x({**TEXT, "description": "a" * 1025}), set()),
    ("nullable", with_x({**TEXT, "nullable": True, **D}), set()),
]


# ------------------------------------------------------------------------------------------- reading back

TOKEN = re.compile(
    r'<\|"\|>(?P<text>.*?)<\|"\|>|(?P<key>[a-zA-Z_][a-zA-Z0-9_.-]*):'
    r"|(?P<number>-?\d+(\.\d+)?)|(?P<word>true|false|null)|(?P<mark>[\[\]{},])",
    re.DOTALL,
)


def read_declaration(text: str) -> Any:
    """The value of a declaration in the format's grammar; ValueError if it is not in it."""
    tokens, at = [], 0
    while at < len(text):
        match = TOKEN.match(text, at)
        if not match:
            raise ValueError(f"at {text[at : at + 20]!r}")
        tokens.append(match)
        at = match.end()
    value, rest = read_value(tokens)
    if rest:
        raise ValueError("text behind the declaration")
    return value


def read_value(tokens: list[Any]) -> tuple[Any, list[Any]]:
    match tokens[0]:
        case m if m["text"] is not None:
            return m["text"], tokens[1:]
        case m if m["number"]:
            return (float if "." in m["number"] else int)(m["number"]), tokens[1:]
        case m if m["word"]:
            return {"true": True, "false": False, "null": None}[m["word"]], tokens[1:]
        case m if m["mark"] == "[":
            return read_sequence(tokens[1:], "]")
        case m if m["mark"] == "{":
            return read_sequence(tokens[1:], "}")
    raise ValueError("no value")


def read_sequence(tokens: list[Any], end: str) -> tuple[Any, list[Any]]:
    items: list[Any] = []
    while tokens and tokens[0]["mark"] != end:
        if items:
            if tokens[0]["mark"] != ",":
                raise ValueError("no comma")
            tokens = tokens[1:]
        key = None
        if end == "}":
            key = tokens[0]["key"]
            if key is None:
                raise ValueError("no key")
            tokens = tokens[1:]
        value, tokens = read_value(tokens)
        items.append(value if key is None else (key, value))
    if not tokens:
        raise ValueError("not closed")
    if end == "]":
        return items, tokens[1:]
    if len(dict(items)) < len(items):
        raise ValueError("a key twice")
    return dict(items), tokens[1:]


def as_schema(read: Any) -> Any:
    """A declaration that was read, with types as in JSON Schema."""
    if not isinstance(read, dict):
        return read
    out = dict(read)
    if isinstance(out.get("type"), str):
        out["type"] = out["type"].lower()
    if isinstance(out.get("properties"), dict):
        out["properties"] = {name: as_schema(inner) for name, inner in out["properties"].items()}
    if "items" in out:
        out["items"] = as_schema(out["items"])
    return out


def without_empty(schema: Any) -> Any:
    """Templates leave out, or add, lists and properties that are empty."""
    if not isinstance(schema, dict):
        return schema
    out = {k: v for k, v in schema.items() if not (k in ("properties", "required", "items") and not v)}
    if "properties" in out:
        out["properties"] = {name: without_empty(inner) for name, inner in out["properties"].items()}
    if "items" in out:
        out["items"] = without_empty(out["items"])
    return out


def read_back(declaration: str) -> Any:
    """Tool parameters of a declaration, or None if it is outside the grammar or holds more than one."""
    try:
        read = read_declaration(re.sub(r"^declaration:[\w.-]+", "", declaration))
    except (ValueError, IndexError):
        return None
    return without_empty(as_schema(read.get("parameters")))


@pytest.fixture(scope="session")
def templates() -> dict[str, Any]:
    """Gemma 4's published templates, set up as transformers does; trl is located, not imported."""
    found = importlib.util.find_spec("trl")
    if found is None or not found.submodule_search_locations:
        pytest.skip("the published templates come with trl")
    jinja2 = pytest.importorskip("jinja2")
    sandbox = pytest.importorskip("jinja2.sandbox")
    folder = Path(found.submodule_search_locations[0]) / "chat_templates"
    environment = sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )

    def raise_exception(message: str) -> None:
        raise jinja2.exceptions.TemplateError(message)

    environment.globals["raise_exception"] = raise_exception
    return {
        commit: environment.from_string((folder / f"{name}.jinja").read_text(encoding="utf-8"))
        for commit, name in TEMPLATE_FILES.items()
    }


def rendered(template: Any, subject: Tool) -> str:
    messages = [{"role": "user", "content": "Hello"}]
    text = template.render(messages=messages, tools=[subject.to_openai()], bos_token="<bos>")
    return text.partition("<|tool>")[2].partition("<tool|>")[0]


# ------------------------------------------------------------------------------------------- one construct at a time


@pytest.mark.parametrize(("code", "parameters", "broken"), CASES, ids=lambda v: v if isinstance(v, str) else "")
def test_each_construct_has_its_code(code: str, parameters: dict[str, Any], broken: set[str]):
    assert code in {finding.code for finding in lint(tool(parameters))}


@pytest.mark.parametrize(("code", "parameters", "broken"), CASES, ids=lambda v: v if isinstance(v, str) else "")
def test_the_templates_break_it_in_the_revisions_named(
    code: str, parameters: dict[str, Any], broken: set[str], templates: dict[str, Any]
):
    subject = tool(parameters)
    wrong = {
        commit
        for commit, template in templates.items()
        if read_back(rendered(template, subject)) != without_empty(parameters)
    }
    assert wrong == broken


@pytest.mark.parametrize(("code", "parameters", "broken"), CASES, ids=lambda v: v if isinstance(v, str) else "")
def test_a_finding_names_the_revisions_that_break(code: str, parameters: dict[str, Any], broken: set[str]):
    named = {f for finding in lint(tool(parameters)) if finding.code == code for f in finding.formats}
    assert broken <= {name.removeprefix("gemma4@") for name in named}


def test_only_revisions_that_break_are_named_where_they_differ():
    for code, parameters, broken in CASES:
        if broken and broken != EVERY and code != "enum-member":
            (finding,) = (f for f in lint(tool(parameters)) if f.code == code)
            named = {name.partition("@")[2] for name in finding.formats if name.startswith("gemma4")}
            assert named == broken


def test_a_plain_tool_has_no_finding():
    nested = {"type": "object", "properties": {"a": {**TEXT, "enum": ["u", "v"], **D}}, "required": ["a"]}
    parameters = {
        "type": "object",
        "properties": {"x": {**nested, **D}, "y": {"type": "array", "items": nested, **D}},
        "required": ["y"],
    }
    assert lint(tool(parameters)) == []


# ------------------------------------------------------------------------------------------- any tool

names = st.from_regex(r"[a-z_][a-zA-Z0-9_]{0,6}", fullmatch=True)
words = st.text(alphabet="abc .,:{}[]'\"\n", min_size=1, max_size=8)
limits = st.fixed_dictionaries({}, optional={"minimum": st.integers(0, 9), "default": st.integers(0, 9)})


def described(schema: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    extra = st.fixed_dictionaries({}, optional={"description": words, "nullable": st.just(True)})
    return st.builds(lambda a, b: a | b, schema, extra)


def objects(inner: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    properties = st.dictionaries(names | st.sampled_from(["type", "description", "a-b", "a b"]), inner, max_size=3)
    return properties.flatmap(
        lambda p: st.fixed_dictionaries(
            {"type": st.just("object"), "properties": st.just(p)},
            optional={"required": st.lists(st.sampled_from(sorted(p)), unique=True, min_size=1)} if p else {},
        )
    )


scalars = st.one_of(
    st.sampled_from([{"type": kind} for kind in ("string", "integer", "number", "boolean")]),
    st.builds(lambda e: {"type": "string", "enum": e}, st.lists(words, min_size=1, max_size=3)),
    st.builds(lambda e: {"type": "integer", "enum": e}, st.lists(st.integers(0, 9), min_size=1, max_size=3)),
    st.builds(lambda extra: {"type": "integer", **extra}, limits),
    st.just({"anyOf": [{"type": "string"}, {"type": "integer"}]}),
)
schemas = st.recursive(
    described(scalars),
    lambda inner: described(
        objects(inner)
        | st.builds(lambda items: {"type": "array", "items": items}, inner)
        | st.just({"type": "array"})
        | st.just({"type": "object"})
        | st.builds(lambda v: {"type": "object", "additionalProperties": v}, inner)
    ),
    max_leaves=6,
)
tools = objects(schemas).map(tool)

# Findings about a declaration that is rendered whole.
HARMLESS = {
    "no-description", "object-without-properties", "items-missing", "case-collision", "nullable", "long-description",
}  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(tools)
def test_a_tool_is_rendered_whole_where_nothing_is_found(templates: dict[str, Any], subject: Tool):
    for commit, template in templates.items():
        codes = {
            f.code for f in lint(subject, f"gemma4@{commit}") if (f.code, f.severity) != ("parameter-name", "warning")
        }
        whole = read_back(rendered(template, subject)) == without_empty(subject.parameters)
        assert whole == (codes <= HARMLESS), (commit, codes)


@settings(max_examples=300, deadline=None)
@given(tools, st.sampled_from(NATIVE_FORMATS))
def test_the_formats_render_every_tool_without_errors(subject: Tool, name: str):
    if any(finding.severity == "error" for finding in lint(subject, name)):
        return
    conversation = Conversation(id="c", tools=(subject,), messages=(Message(role="user", content="Hello"),))
    text = "".join(segment.text for segment in find_format(name).render(conversation))
    assert subject.name in text


@settings(max_examples=200, deadline=None)
@given(tools)
def test_described_constraints_are_no_longer_found(subject: Tool):
    described_tool = describe_constraints(subject)
    assert {f.code for f in lint(described_tool)}.isdisjoint({"default", "constraint"})
    assert describe_constraints(described_tool) == described_tool


# ------------------------------------------------------------------------------------------- the rest


def test_limits_in_words():
    nights = {"type": "integer", "description": "How many nights", "default": 2, "minimum": 1, "maximum": 30}
    day = {"type": "string", "description": "First day.", "format": "date"}
    stars = {"type": "integer", "enum": [3, 4, 5]}
    parameters = {"type": "object", "properties": {"nights": nights, "day": day, "stars": stars}}
    properties = describe_constraints(tool(parameters)).parameters["properties"]
    assert properties["nights"] == nights | {"description": "How many nights. Default 2. Between 1 and 30."}
    assert properties["day"] == day | {"description": "First day. A date such as 2026-01-31."}
    assert properties["stars"] == {"description": "One of 3, 4, 5.", "type": "integer"}


def test_a_format_narrows_the_findings():
    subject = tool({"type": "object", "properties": {"type": {**TEXT, **D}}})
    assert [f.formats for f in lint(subject, "gemma4@4742fe8")] == [("gemma4@4742fe8",)]
    assert lint(subject, "gemma4") == lint(subject, "gemma4-31b-thinking") == lint(subject, "gemma3-json") == []


@pytest.mark.parametrize("name", ["gemma5", "gemma4@1234567", "functiongemma@4742fe8"])
def test_unknown_formats_are_refused(name: str):
    with pytest.raises(UserError, match=r"no (format|revision) .*Choose one of"):
        lint(tool({"type": "object"}), name)


def test_two_tools_of_one_name():
    subject = tool(with_x({**TEXT, **D}))
    (finding,) = lint_tools([subject, subject], "functiongemma")
    assert (finding.code, finding.severity, finding.where) == ("duplicate-tool", "error", "f")


@pytest.mark.parametrize(
    ("name", "format", "severities"),
    [
        ("math.add", "gemma4", ["warning"]),
        ("math.add", "gemma3-python", []),
        ("get-weather", "gemma3-python", ["error"]),
        ("class", "gemma3-python", ["error"]),
        ("class", "gemma3-json", []),
    ],
)
def test_names_of_tools(name: str, format: str, severities: list[str]):
    findings = lint(tool({"type": "object"}, name=name), format)
    assert [(f.code, f.severity) for f in findings] == [("tool-name", severity) for severity in severities]


def test_control_tokens_are_found_in_every_text():
    parameters = {"type": "object", "properties": {"x": {**TEXT, "enum": ["<escape>"], **D}}}
    (finding,) = lint(tool(parameters), "functiongemma")
    assert (finding.code, finding.where) == ("control-token", "f.x")
    assert lint(tool(parameters), "gemma4") == lint(tool(parameters), "gemma3-json") == []
    parameters = {"type": "object", "properties": {"x": {**TEXT, "description": "Goes into <tool_response>."}}}
    (finding,) = lint(tool(parameters), "qwen3")
    assert (finding.code, finding.where, finding.formats) == ("control-token", "f.x", ("qwen3",))
    (finding,) = lint(tool({"type": "object"}, description="End <end_of_turn>"), "gemma3-json")
    assert finding.where == "f"


def test_the_path_leads_through_lists():
    inner = {"type": "object", "properties": {"a": {"type": "integer", "enum": [1], **D}}}
    (finding,) = lint(tool(list_of(inner)), "functiongemma")
    assert finding.where == "f.x[].a"
    assert str(finding) == (
        "f.x[].a: error enum-not-string: the choices of type integer are dropped. "
        "Use strings, or run toolspec lint --fix [functiongemma]"
    )


raw_keys = st.sampled_from([
    "description", "type", "properties", "required", "items", "enum", "anyOf", "$ref", "const", "default", "nullable",
    "minimum", "maxItems", "uniqueItems", "pattern", "prefixItems", "additionalProperties", "x", "format",
])  # fmt: skip
raw_leaves = st.none() | st.booleans() | st.integers(-2, 2) | st.sampled_from(["string", "OBJECT", "array", "x"])
raw = st.recursive(
    raw_leaves, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(raw_keys, inner, max_size=5), max_leaves=12
)


@settings(max_examples=300, deadline=None)
@given(st.dictionaries(raw_keys, raw, max_size=5))
def test_what_is_no_schema_is_linted_without_a_crash(parameters: dict[str, Any]):
    lint(describe_constraints(tool(parameters)))
