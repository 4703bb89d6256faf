"""`portlab-bench plan`: plan-tpu as it is, and its JSON kept."""

import stat
import sys
from pathlib import Path

import pytest

from portlab_bench import commands_plan
from portlab_bench.commands_plan import PlanCommand, find_planner, load_plan, main_plan, run_plan, split_arguments
from portlab_spec.errors import UserError


@pytest.fixture
def planner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stand-in beside the interpreter that prints its arguments, as JSON where asked; exits as --exit says."""
    program = tmp_path / "bin/plan-tpu"
    program.parent.mkdir()
    program.write_text(
        f"#!{sys.executable}\n"
        "import json, sys\n"
        "args = sys.argv[1:]\n"
        "code = int(args[args.index('--exit') + 1]) if '--exit' in args else 0\n"
        "if code == 2: sys.exit('plan-tpu: error: no such slice')\n"
        "if '--rubbish' in args: print('tables'); sys.exit(0)\n"
        "print(json.dumps([{'slice': {'name': 'v6e-8'}, 'args': args}]) if '--json' in args else 'a table')\n"
        "sys.exit(code)\n"
    )
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(commands_plan.sys, "executable", str(tmp_path / "bin/python"))
    return program


def test_arguments_are_plan_tpus_but_out(tmp_path: Path) -> None:
    assert split_arguments(["--slice", "v6e-8", "--out", "a.json", "--search"]) == PlanCommand(
        ("--slice", "v6e-8", "--search"), Path("a.json")
    )
    assert split_arguments(["--out=b.json"]) == PlanCommand((), Path("b.json"))
    for args in (["--out"], ["--out", "--search"], ["--out", "a", "--out", "b"], ["--out="]):
        with pytest.raises(UserError, match="--out"):
            split_arguments(args)


def test_the_record_holds_question_and_answer(tmp_path: Path, planner: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "plan.json"
    assert main_plan(["--slice", "v6e-8", "--json", "--out", str(out)]) == 0
    record = load_plan(out)
    assert record.arguments == ("--slice", "v6e-8", "--json")
    assert record.plans[0]["args"] == ["--slice", "v6e-8", "--json"]
    assert "1 plans" in capfd.readouterr().out
    assert main_plan(["--slice", "v6e-8"]) == 0
    assert capfd.readouterr().out == "a table\n"


def test_help_is_both(planner: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main_plan(["--help"]) == 0
    printed = capfd.readouterr().out
    assert printed.startswith("usage: portlab-bench plan [--out FILE]")
    assert printed.endswith("a table\n")


def test_its_exit_code_is_ours_and_no_bad_record_is_kept(
    tmp_path: Path, planner: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "plan.json"
    assert main_plan(["--exit", "2", "--out", str(out)]) == 1  # sys.exit of a text is 1, as argparse's is 2
    assert not out.exists()
    assert "no such slice" in capfd.readouterr().err
    with pytest.raises(UserError, match="printed no JSON"):
        main_plan(["--rubbish", "--out", str(out)])
    assert not out.exists()
    assert run_plan(PlanCommand(("--exit", "1"), out)) == 1
    assert load_plan(out).plans  # nothing fits, which is an answer


def test_where_it_is_not_it_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands_plan.sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match="train-jax"):
        find_planner(tmp_path)
    (tmp_path / ".nox/train_jax_tpu/bin").mkdir(parents=True)
    (tmp_path / ".nox/train_jax_tpu/bin/plan-tpu").touch()
    assert find_planner(tmp_path) == str(tmp_path / ".nox/train_jax_tpu/bin/plan-tpu")


@pytest.mark.parametrize("text", ["", "{}", '{"when": 1', '{"schema_version": 2}'])
def test_a_file_that_is_no_record_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "plan.json").write_text(text)
    with pytest.raises(UserError, match="record of a plan"):
        load_plan(tmp_path / "plan.json")
    with pytest.raises(UserError, match="not found"):
        load_plan(tmp_path / "none.json")
