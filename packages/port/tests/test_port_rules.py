"""The tables are whole: every key has a rule, every rule a reason and a place to read on, every field of TRL a key."""

import ast
import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from portlab_port.dialects import DIALECTS, calls, trl, unsloth
from portlab_port.rules import FATES, GROUPS, RULES
from portlab_spec.recipe import field_names

DOCS = Path(__file__).parents[3] / "docs"
TABLES = {
    **{name: dialect.keys for name, dialect in DIALECTS.items()},
    "launchers": calls.LAUNCHERS,
    "bitsandbytes": calls.BITS_AND_BYTES,
    "trainer configuration": calls.TRAINER_CONFIG,
    "fast model": unsloth.FAST_MODEL,
    "auto model": calls.AUTO_MODEL,
    "trainer": calls.TRAINER_CALL,
    "adapter": unsloth.LORA_CONFIG,
}


@pytest.mark.parametrize("table", TABLES)
def test_every_key_has_a_rule(table):
    assert not {key: entry.name for key, entry in TABLES[table].items() if entry.name not in RULES}


@pytest.mark.parametrize("style", DIALECTS)
def test_prefixes_and_defaults_have_rules(style):
    dialect = DIALECTS[style]
    assert set(dialect.prefixes.values()) <= set(RULES)
    assert {*dialect.defaults, *dialect.lora_defaults} <= set(RULES)
    assert dialect.marks <= set(dialect.keys)


def test_names_are_unique():
    assert len(RULES) == sum(len(rules) for rules in GROUPS.values())


@pytest.mark.parametrize("rule", RULES.values(), ids=lambda rule: rule.name)
def test_a_rule_says_what_becomes_of_it_and_why(rule):
    assert rule.fate in FATES
    assert 10 < len(rule.why) < 220
    assert not rule.why.endswith(".")
    for key in filter(None, (part.strip() for part in rule.to.split(","))):
        assert key in field_names(), key
    assert rule.loss <= (rule.fate == "cannot")


@pytest.mark.parametrize("docs", sorted({rule.docs for rule in RULES.values()}))
def test_the_docs_that_rules_point_to_exist(docs):
    name, _, anchor = docs.partition("#")
    text = (DOCS / name).read_text()
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    anchors = {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
    assert not anchor or anchor in anchors


def _fields(module: str, file: str, name: str) -> set[str]:
    """Fields of a dataclass, or parameters of a constructor, in an installed library's source; nothing is imported."""
    found = find_spec(module)
    if found is None or found.origin is None:
        pytest.skip(f"{module} is not installed here")
    tree = ast.parse((Path(found.origin).parent / file).read_text())
    cls = next(node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name == name)
    fields = {
        item.target.id for item in cls.body if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
    }
    for item in cls.body:
        if isinstance(item, ast.FunctionDef) and item.name == "__init__" and not fields:
            fields = {argument.arg for argument in item.args.args} - {"self"}
    assert fields
    return {field for field in fields if not field.startswith("_")}


@pytest.mark.parametrize(
    ("module", "file", "name", "style"),
    [
        ("transformers", "training_args.py", "TrainingArguments", "trl"),
        ("transformers", "training_args.py", "TrainingArguments", "axolotl"),
        ("transformers", "training_args.py", "TrainingArguments", "llama-factory"),
        ("transformers", "training_args.py", "TrainingArguments", "unsloth"),
        ("trl", "trainer/sft_config.py", "SFTConfig", "trl"),
        ("trl", "trainer/model_config.py", "ModelConfig", "trl"),
        ("trl", "scripts/utils.py", "ScriptArguments", "trl"),
    ],
)
def test_every_field_of_the_installed_libraries_is_known(module, file, name, style):
    fields = _fields(module, file, name)
    assert not {field for field in fields if DIALECTS[style].find(field) is None}


@pytest.mark.parametrize(
    ("module", "file", "name", "table"),
    [
        ("peft", "tuners/lora/config.py", "LoraConfig", "adapter"),
        ("transformers", "utils/quantization_config.py", "BitsAndBytesConfig", "bitsandbytes"),
    ],
)
def test_every_argument_in_scripts_is_known(module, file, name, table):
    assert not _fields(module, file, name) - set(TABLES[table])


@pytest.mark.parametrize(
    ("file", "name", "defaults"),
    [
        ("training_args.py", "TrainingArguments", trl.HF_DEFAULTS),
    ],
)
def test_defaults_are_those_of_transformers(file, name, defaults):
    found = find_spec("transformers")
    if found is None or found.origin is None:
        pytest.skip("transformers is not installed here")
    tree = ast.parse((Path(found.origin).parent / file).read_text())
    cls = next(node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name == name)
    checked = 0
    for item in cls.body:
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name) and isinstance(item.value, ast.Call):
            default = next((k.value for k in item.value.keywords if k.arg == "default"), None)
            if item.target.id in defaults and isinstance(default, ast.Constant):
                assert default.value == defaults[item.target.id], item.target.id
                checked += 1
    assert checked >= 8
