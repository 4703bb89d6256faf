"""What is added to a command line, and that nothing the user gave is changed."""

import shlex
from pathlib import Path

import pytest

from portlab_serve.chat_template import shipped
from portlab_serve.command_line import resolve
from portlab_serve.launch import SERVER, prepare
from portlab_serve.parser_names import PARSER_NAMES, PLUGIN
from portlab_spec.files import write_json


def added(model, *more: str, target="vllm", tool_format="auto", **options) -> list[str]:
    """The words behind the user's own."""
    args = resolve([str(model.path), *more])
    command = prepare(args, target, {}, tool_format, **options).command
    own = ["-m", SERVER, *args.words]
    assert list(command[1 : 1 + len(own)]) == own
    return list(command[1 + len(own) :])


def test_parser_and_template_follow_from_the_model(functiongemma):
    assert added(functiongemma) == [
        "--tool-call-parser", "portlab-functiongemma", "--enable-auto-tool-choice", "--tool-parser-plugin", PLUGIN,
        "--chat-template", str(shipped("functiongemma")),
    ]  # fmt: skip


def test_gemma_4_reasons_through_vllms_parser(gemma4_31b):
    words = added(gemma4_31b)
    assert words[words.index("--tool-call-parser") + 1] == "portlab-gemma4"
    assert words[words.index("--reasoning-parser") + 1] == "portlab-gemma4"
    assert words[words.index("--reasoning-parser-plugin") + 1] == "portlab_serve.vllm_plugin"
    assert words[-1] == str(shipped("gemma4-31b"))


def test_another_format_can_be_asked_for(gemma3_4b):
    words = added(gemma3_4b, tool_format="gemma3-python")
    assert words[words.index("--tool-call-parser") + 1] == "portlab-gemma3-python"
    assert words[-1] == str(shipped("gemma3-python"))


def test_a_merged_model_is_served_in_the_format_it_was_trained_on(gemma3_4b):
    write_json(gemma3_4b.path / "merge_manifest.json", {"tool_format": "gemma3-python"})
    words = added(gemma3_4b)
    assert words[words.index("--tool-call-parser") + 1] == "portlab-gemma3-python"
    words = added(gemma3_4b, tool_format="gemma3-json")
    assert words[words.index("--tool-call-parser") + 1] == "portlab-gemma3-json"


@pytest.mark.parametrize("manifest", [{}, {"tool_format": None}, []])
def test_a_manifest_that_names_no_format_changes_nothing(gemma3_4b, manifest):
    write_json(gemma3_4b.path / "merge_manifest.json", manifest)
    assert "portlab-gemma3-json" in added(gemma3_4b)


def test_a_format_that_is_not_known_is_said(gemma3_4b):
    write_json(gemma3_4b.path / "merge_manifest.json", {"tool_format": "gemma9"})
    findings = prepare(resolve([str(gemma3_4b.path)]), "vllm", {}).findings
    (found,) = [finding for finding in findings if "gemma9" in finding.what]
    assert (found.level, found.fix) == ("error", "Pass --tool-format")
    assert "merge_manifest.json" in found.where


def test_a_model_of_the_hub_gets_the_format_that_is_asked_for():
    command = prepare(resolve(["google/gemma-4-31B-it"]), "vllm-tpu", {}, "gemma4-31b").command
    assert command[-1] == str(shipped("gemma4-31b"))


def test_no_format_sets_nothing(functiongemma):
    assert added(functiongemma, tool_format="none") == []


def test_the_models_own_template_is_kept_if_it_agrees(functiongemma):
    text = shipped("functiongemma").read_text(encoding="utf-8")
    write_json(functiongemma.path / "tokenizer_config.json", {"chat_template": text})
    assert "--chat-template" not in added(functiongemma)


def test_the_models_own_template_is_replaced_if_it_departs_and_that_is_said(functiongemma):
    (functiongemma.path / "chat_template.jinja").write_text("{{ messages[0].content }}")
    launch = prepare(resolve([str(functiongemma.path)]), "vllm", {})
    assert launch.command[-1] == str(shipped("functiongemma"))
    assert any("departs from functiongemma" in finding.what for finding in launch.findings)


def test_the_users_template_is_kept_and_compared(functiongemma, tmp_path):
    given = tmp_path / "mine.jinja"
    given.write_text("{{ messages[0].content }}")
    launch = prepare(resolve([str(functiongemma.path), "--chat-template", str(given)]), "vllm", {})
    assert launch.command.count("--chat-template") == 1
    assert [f.where for f in launch.findings if f.level == "warning"] == [f"--chat-template {given}"]


def test_the_users_parser_is_kept_and_a_bad_one_named(functiongemma):
    launch = prepare(resolve([str(functiongemma.path), "--tool-call-parser", "functiongemma"]), "vllm", {})
    assert PLUGIN not in launch.command
    assert any("drops numbers" in finding.what for finding in launch.findings)


def test_one_of_our_parsers_by_name_brings_the_plugin(functiongemma):
    assert PLUGIN in added(functiongemma, "--tool-call-parser", "portlab-functiongemma")


def test_no_tool_choice_sets_no_parser(functiongemma):
    assert "--tool-call-parser" not in added(functiongemma, "--no-enable-auto-tool-choice")


def test_the_cache_folder_holds_all_caches(functiongemma):
    args = resolve([str(functiongemma.path)])
    assert prepare(args, "vllm-tpu", {"HF_HOME": "/mine"}, cache=Path("/cache")).environment == {
        "VLLM_CACHE_ROOT": "/cache/vllm",
        "VLLM_XLA_CACHE_PATH": "/cache/xla",
    }


def test_the_line_is_one_that_a_shell_takes(functiongemma):
    args = resolve([str(functiongemma.path), "--additional-config", '{"a": 1}'])
    launch = prepare(args, "vllm-tpu", {}, cache=Path("/my cache"))
    assert '{"a": 1}' in shlex.split(launch.shell_line)
    assert shlex.split(launch.shell_line)[0] == "HF_HOME=/my cache/huggingface"


def test_an_adapter_cannot_be_named_and_switched_off(functiongemma, tmp_path):
    folder = functiongemma.adapter(tmp_path / "a")
    args = resolve([str(functiongemma.path), "--lora-modules", f"a={folder}", "--no-enable-lora"])
    assert [f.where for f in prepare(args, "vllm", {}).findings if f.level == "error"] == ["--no-enable-lora"]


@pytest.mark.parametrize("name", sorted(PARSER_NAMES))
def test_every_parser_is_named_for_its_format(name):
    assert PARSER_NAMES[name] == f"portlab-{name}"


@pytest.mark.parametrize("option", ["--generation-config=vllm", '--override-generation-config={"temperature": 0}'])
def test_an_option_that_loses_the_stops_is_a_warning(functiongemma, option):
    launch = prepare(resolve([str(functiongemma.path), option]), "vllm", {})
    assert [f.check for f in launch.findings if f.level == "warning"] == ["stops"]


@pytest.mark.parametrize("target", ["vllm", "vllm-tpu", "cpu"])
def test_a_cpu_mixes_base_and_adapter(functiongemma, tmp_path, target):
    folder = functiongemma.adapter(tmp_path / "a")
    found = prepare(resolve([str(functiongemma.path), "--lora-modules", f"a={folder}"]), target, {}).findings
    assert any("share a batch" in f.what for f in found) == (target == "cpu")
