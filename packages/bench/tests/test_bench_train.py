"""The train bench: step times out of running means, guards, and trainers as processes (stand-ins of the real files)."""

import importlib.util
import json
import os
import stat
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from portlab_bench import commands_train, train_run
from portlab_bench.commands_train import TrainCommand, parse_backends, parse_overrides, parse_pairs, run_train
from portlab_bench.train_figures import compare, run_findings, steady, step_times, table
from portlab_bench.train_run import find_trainer, load_train_run
from portlab_bench.train_schema import BackendRun
from portlab_bench.train_trl import Work, counts, read_work, require_able, write_work
from portlab_spec.data.tokens import Row
from portlab_spec.errors import UserError
from portlab_spec.recipe import Lora, Optimizer, Recipe

# Writes what a trainer writes, by the schema of the report and the running means of the loop; what it does besides
# stands in STAND_IN, a JSON object in the environment.
TRAINER = """
    import json, os, subprocess, sys, time
    from pathlib import Path
    import yaml

    arguments = dict(zip(sys.argv[1::2], sys.argv[2::2]))
    me = Path(sys.argv[0]).name.removeprefix("train-")
    plan = json.loads(os.environ.get("STAND_IN", "{}")).get(me, {})
    recipe = yaml.safe_load(Path(arguments["--recipe"]).read_text())
    out = Path(arguments["--out"])
    out.mkdir(parents=True)
    print("JAX_PLATFORMS", os.environ.get("JAX_PLATFORMS"), "--device", arguments.get("--device"), flush=True)
    if "child" in plan:
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        (out / "child.pid").write_text(str(child.pid))
    time.sleep(plan.get("sleep", 0))
    if "die" in plan:
        print("loading\\ntrain-stand-in: error: the accelerator is on fire. Put it out", file=sys.stderr)
        sys.exit(plan["die"])
    seconds = plan.get("seconds", [9.0] + [0.5 + 0.01 * i for i in range(recipe["steps"] - 1)])
    losses = plan.get("losses", [4.0 / (i + 1) for i in range(recipe["steps"])])
    total = steps = 0
    with (out / "metrics.jsonl").open("w") as file:
        for number, (took, loss) in enumerate(zip(seconds, losses), start=1):
            line = {"step": number, "loss": loss}
            if number > 1:
                total, steps = total + took, steps + 1
            if steps:
                line |= {"seconds_per_step": total / steps, "examples_per_second": 32 * steps / total,
                         "tokens_per_second": 9600 * steps / total, "computed_tokens_per_second": 1200 * steps / total}
                if "mfu" in plan:
                    line["mfu"] = plan["mfu"]
            file.write(json.dumps(line) + "\\n")
            file.flush()
    time.sleep(plan.get("linger", 0))
    evaluation = {"split": "test", "examples": 1, "metrics": {}}
    report = {
        "recipe": recipe | plan.get("recipe", {}), "backend": plan.get("backend", me),
        "device": {"platform": "cpu", "kind": "cpu", "count": 1}, "versions": {"python": "3.12"},
        "when": "2026-11-29T00:00:00+00:00", "before": evaluation, "after": evaluation, "loss": losses,
        "seconds": {"prepare": 0.0, "before": 0.0, "train": total, "after": 0.0, "export": 0.0},
        "peak_rss_bytes": 2**30, "paths": {},
        "tokens": json.loads(os.environ["COUNTS"]) | plan.get("rows", {}) | {"run_held": 4, "run_computed": 5},
    }
    (out / "report.json").write_text(plan.get("report", json.dumps(report)))
"""


@pytest.fixture
def trainers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Environments with a stand-in for each trainer, as --python options."""
    options = []
    for name in ("jax", "xla", "torchax"):
        folder = tmp_path / f"env-{name}" / "bin"
        folder.mkdir(parents=True)
        (folder / "python").symlink_to(sys.executable)
        script = folder / f"train-{name}"
        script.write_text(f"#!{sys.executable}\n{textwrap.dedent(TRAINER)}")
        script.chmod(script.stat().st_mode | stat.S_IXUSR)
        options.append(f"{name}={folder / 'python'}")

    def load(recipe: Recipe) -> Work:
        work = make_work(tmp_path, recipe)
        monkeypatch.setenv("COUNTS", json.dumps(counts(work)))
        return work

    monkeypatch.setattr(commands_train.train_run, "load_work", load)
    return options


def make_work(folder: Path, recipe: Recipe) -> Work:
    """Forty rows of 3 to 6 tokens, the last one of each supervised."""
    rows = [Row(f"r{i}", tuple(range(3 + i % 4)), (False,) * (2 + i % 4) + (True,)) for i in range(40)]
    return Work(folder / "model", rows, train_run.order(recipe, rows))


def command(tmp_path: Path, python: list[str], **changes: Any) -> TrainCommand:
    return TrainCommand(**{"out": tmp_path / "out", "steps": 8, "python": tuple(python)} | changes)


def plan(monkeypatch: pytest.MonkeyPatch, **backends: dict[str, Any]) -> None:
    monkeypatch.setenv("STAND_IN", json.dumps(backends))


def test_three_trainers_side_by_side(
    tmp_path: Path, trainers: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plan(
        monkeypatch, jax={"seconds": [30, 2, 0.4, 0.5, 0.6, 0.45, 0.5, 0.55], "mfu": 0.25, "sleep": 0.3, "linger": 0.3}
    )
    assert run_train(command(tmp_path, trainers, device="cpu")) == 0
    record = load_train_run(tmp_path / "out/train.json")
    jax, xla, _ = record.runs
    assert [run.backend for run in record.runs] == ["jax", "xla", "torchax"]
    assert jax.steady is not None
    assert jax.steady.steps == (3, 4, 5, 6, 7, 8)  # step 1 compiled, step 2 is warm-up
    assert jax.steady.seconds.mean == pytest.approx(0.5)
    assert jax.steady.seconds.quantiles["p50"].value == pytest.approx(0.5)
    assert jax.steady.seconds.maximum == pytest.approx(0.6)
    assert jax.steady.examples_per_second == pytest.approx(6 * 32 / 3.0, rel=0.01)
    assert jax.steady.mfu == pytest.approx(0.25)
    assert jax.first_step_seconds is not None
    assert jax.first_step_seconds > 0.3
    assert jax.loss[-1] == 0.5
    assert xla.steady is not None
    assert xla.steady.mfu is None
    assert len(record.rows_digest) == 64
    assert record.recipe["steps"] == 8
    assert {run.recipe_digest for run in record.runs} == {record.recipe_digest}
    assert all(finding.ok for finding in record.findings)
    assert "JAX_PLATFORMS cpu --device None" in (tmp_path / "out/jax.log").read_text()
    assert "--device cpu" in (tmp_path / "out/xla.log").read_text()
    printed = capsys.readouterr().out
    assert (tmp_path / "out/train.md").read_text() == printed
    assert "| jax | 1 x cpu | 64.00 |" in printed
    assert "| 25.0% | 1.00 (host) | 0.5000 |" in printed


def test_one_that_fails_is_told_and_the_others_stay(
    tmp_path: Path, trainers: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plan(monkeypatch, jax={"die": 3})
    assert run_train(command(tmp_path, trainers)) == 1
    record = load_train_run(tmp_path / "out/train.json")
    assert record.runs[0].failure == "exit code 3: train-stand-in: error: the accelerator is on fire. Put it out"
    assert [run.valid for run in record.runs] == [False, True, True]
    assert "on fire" in capsys.readouterr().out


def test_one_that_takes_too_long_is_ended_with_its_children(
    tmp_path: Path, trainers: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan(monkeypatch, jax={"sleep": 60, "child": True})
    started = time.monotonic()
    assert run_train(command(tmp_path, trainers[:1], backends="jax", timeout=1.5)) == 1
    assert time.monotonic() - started < 20
    run = load_train_run(tmp_path / "out/train.json").runs[0]
    assert run.failure == "ended after 1.5 s, its --timeout"
    child = int((tmp_path / "out/jax/child.pid").read_text())
    assert gone(child)


def gone(pid: int) -> bool:
    """Whether a process has ended (a zombie that nobody waits for has)."""
    for _ in range(50):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        status = Path(f"/proc/{pid}/stat")
        if status.exists() and status.read_text().rpartition(")")[2].split()[0] == "Z":
            return True
        time.sleep(0.1)
    return False


UNUSABLE = {
    "no JSON": ({"report": '{"recipe"'}, "not valid JSON"),
    "no report": ({"report": "{}"}, "is no report"),
    "another backend": ({"backend": "torchax"}, "is of the backend torchax"),
    "another recipe": ({"recipe": {"batch_size": 4}}, "is of another recipe"),
    "no time": ({"seconds": [1, 2, -1, 1, 1, 1, 1, 1]}, "step 3 took"),
}


@pytest.mark.parametrize("name", UNUSABLE)
def test_what_a_trainer_leaves_is_checked(
    tmp_path: Path, trainers: list[str], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    what, says = UNUSABLE[name]
    plan(monkeypatch, jax=what)
    assert run_train(command(tmp_path, trainers[:1], backends="jax")) == 1
    assert says in load_train_run(tmp_path / "out/train.json").runs[0].failure


MARKED = {
    "rows": ({"rows": {"run": 7}}, "rows"),
    "first loss": ({"losses": [4.1, 2, 1.5, 1, 0.8, 0.6, 0.55, 0.5]}, "first loss"),
    "curve": ({"losses": [4, 3, 3, 3, 3, 3, 3, 3]}, "losses"),
}


@pytest.mark.parametrize("name", MARKED)
def test_trainers_that_did_not_do_the_same_are_marked(
    tmp_path: Path, trainers: list[str], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    what, guard = MARKED[name]
    plan(monkeypatch, xla=what)
    assert run_train(command(tmp_path, trainers[:2], backends="jax,xla")) == 1
    record = load_train_run(tmp_path / "out/train.json")
    assert [finding.guard for finding in record.findings if not finding.ok] == [guard]
    of_the_run = [finding.guard for finding in record.runs[1].findings if not finding.ok]
    assert of_the_run == (["rows of the recipe"] if name == "rows" else [])


def test_more_than_the_peak_and_too_few_steps_are_refused(
    tmp_path: Path, trainers: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plan(monkeypatch, jax={"mfu": 1.2})
    assert run_train(command(tmp_path, trainers[:1], backends="jax")) == 1
    assert "peak: 120.0% of the devices' peak" in capsys.readouterr().out
    assert "| 1 x cpu |  |  |" in (tmp_path / "out/train.md").read_text()  # no figure of it is shown
    four = command(tmp_path, trainers[:1], backends="jax", steps=4, out=tmp_path / "four")
    assert run_train(four) == 1
    assert "fewer than 3 steps" in capsys.readouterr().out


def test_bad_usage_runs_nothing(tmp_path: Path, trainers: list[str]) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full/file").touch()
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"backends": "jax,tunix"}, "unknown tunix"),
        ({"backends": "jax,jax"}, "each once"),
        ({"backends": ""}, "at least one"),
        ({"backends": "jax", "python": ["torchax=/x"]}, "BACKEND=PATH"),
        ({"backends": "jax", "python": ["jax=/no/such/python"]}, "no such interpreter"),
        ({"set": ("lora.rank",)}, "KEY=VALUE"),
        ({"set": ("lora.rang=8",)}, "did you mean"),
        ({"warm_up": 0}, "warm-up"),
        ({"steps": 3, "warm_up": 3}, "all warm-up"),
        ({"timeout": 0.0}, "above 0"),
        ({"out": tmp_path / "full"}, "not empty"),
    ]
    for changes, says in wrong:
        with pytest.raises(UserError, match=says):
            run_train(command(tmp_path, **{"python": trainers} | changes))
    assert not (tmp_path / "out").exists()


def test_trainers_are_found_in_the_environments_of_nox(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("train_jax", "train_jax_tpu"):
        (tmp_path / f".nox/{name}/bin").mkdir(parents=True)
        (tmp_path / f".nox/{name}/bin/train-jax").touch()
    assert find_trainer("jax", root=tmp_path).command == (str(tmp_path / ".nox/train_jax/bin/train-jax"),)
    on_tpu = find_trainer("jax", root=tmp_path, device="tpu")
    assert on_tpu.command == (str(tmp_path / ".nox/train_jax_tpu/bin/train-jax"),)
    assert on_tpu.environment == {"JAX_PLATFORMS": "tpu"}
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with pytest.raises(UserError, match="nox -s train_torchax"):
        find_trainer("torchax", root=tmp_path)


def means(seconds: list[float], compiled: set[int]) -> list[str]:
    """Lines as the loop writes them."""
    lines, total, count = [], 0.0, 0
    for step, took in enumerate(seconds, start=1):
        if step not in compiled:
            total, count = total + took, count + 1
        line: dict[str, Any] = {"step": step, "loss": 1.0}
        if count:
            line |= {"seconds_per_step": total / count, "examples_per_second": 4 * count / total}
            line |= {"tokens_per_second": 40 * count / total, "computed_tokens_per_second": 10 * count / total}
        lines.append(json.dumps(line))
        lines.append(json.dumps({"step": step, "monitored_loss": 1.0}))
    return lines


@given(st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=40), st.sets(st.integers(1, 40)))
def test_single_steps_come_back_out_of_running_means(seconds: list[float], compiled: set[int]) -> None:
    times = step_times(means(seconds, compiled), "metrics.jsonl")
    expected = [(i, s) for i, s in enumerate(seconds, start=1) if i not in compiled]
    # A step that leaves the mean exactly as it was looks like one that compiled: only steps of one length can.
    if len({time for _, time in expected}) == len(expected):
        assert [time.step for time in times] == [step for step, _ in expected]
        assert [time.seconds for time in times] == pytest.approx([s for _, s in expected], rel=1e-6, abs=1e-8)
        assert [time.tokens for time in times] == pytest.approx([40.0] * len(times), rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("line", ["{", "[1]", '{"step": 1, "seconds_per_step": "fast"}'])
def test_metrics_that_no_trainer_writes_are_refused(line: str) -> None:
    with pytest.raises(UserError, match="line 1"):
        step_times([line], "metrics.jsonl")


def test_every_loss_must_agree_from_one_adapter() -> None:
    losses = {"jax": (4.0, 2.0, 1.0), "xla": (4.0, 2.02, 1.0)}
    runs = [BackendRun(backend=name, loss=loss, device={"platform": "cpu"}) for name, loss in losses.items()]
    assert all(finding.ok for finding in compare(runs, "auto", same_start=False))
    refused = [finding for finding in compare(runs, "auto", same_start=True) if not finding.ok]
    assert [finding.guard for finding in refused] == ["losses"]
    assert all(finding.ok for finding in compare(runs, "bfloat16", same_start=True))
    assert compare(runs[:1], "auto", same_start=True) == ()


def test_a_stopped_run_and_a_loss_that_is_no_number_are_refused() -> None:
    times = step_times(means([9.0, 2.0, 2.1, 2.2, 2.3], {1}), "")
    rates = steady(times, 1)
    assert rates is not None
    assert [f.guard for f in run_findings(rates, times, 6, [1.0] * 5, 1) if not f.ok] == ["steps"]
    assert [f.guard for f in run_findings(rates, times, 5, [1.0, float("nan"), 1, 1, 1], 1) if not f.ok] == ["finite"]
    assert steady([], 1) is None


def test_a_machine_that_was_not_left_alone_shows() -> None:
    times = step_times(means([9.0, 2.0, 2.1, 7.0, 8.0], {1}), "")
    assert [f.guard for f in run_findings(steady(times, 1), times, 5, [1.0] * 5, 1) if not f.ok] == ["spread"]


def test_a_finished_run_of_another_machine_is_read(
    tmp_path: Path, trainers: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run_train(command(tmp_path, trainers[:1], backends="jax")) == 0
    plan(monkeypatch, xla={"linger": 0.3})
    again = command(
        tmp_path,
        trainers[1:2],
        backends="jax,xla",
        finished=(f"jax={tmp_path / 'out/jax'}",),
        out=tmp_path / "again",
    )
    assert run_train(again) == 0
    runs = load_train_run(tmp_path / "again/train.json").runs
    assert [(run.backend, run.first_step_seconds is None) for run in runs] == [("jax", True), ("xla", False)]
    none = command(tmp_path, [], backends="jax", finished=("jax=nowhere",), out=tmp_path / "none")
    assert run_train(none) == 1


PLAIN = Recipe(
    steps=6,
    batch_size=4,
    lora=Lora(rank=2, alpha=4, targets=("q_proj",), train_control_rows=False),
    optimizer=Optimizer(schedule="constant", warmup_steps=0),
)
TINY = {
    "model_type": "gemma3_text", "vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "query_pre_attn_scalar": 8,
    "max_position_embeddings": 64, "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"],
    "rope_theta": 1e6, "rope_local_base_freq": 1e4, "rope_scaling": None, "rms_norm_eps": 1e-6,
    "hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": True, "attention_bias": False,
    "bos_token_id": 2, "eos_token_id": 1, "pad_token_id": 0,
}  # fmt: skip


@pytest.fixture
def work(tmp_path: Path) -> Work:
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text(json.dumps(TINY))
    return make_work(tmp_path, PLAIN)


def test_trls_work_folder_is_what_its_runner_reads(tmp_path: Path, work: Work) -> None:
    exchange = Path(__file__).parents[3] / "bench/peers/exchange.py"
    spec = importlib.util.spec_from_file_location("exchange_of_peers", exchange)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look themselves up there
    spec.loader.exec_module(module)
    write_work(tmp_path / "trl", PLAIN, work, "cpu", 2)
    job = module.read_job(tmp_path / "trl")
    assert job.settings.micro_batch == {"trl": 2}
    assert job.settings.dtype == "float32"
    assert [[tuple(row.ids) for row in batch] for batch in job.batches] == [
        [row.ids for row in batch] for batch in work.batches
    ]
    assert job.batches[0][0].loss[-1] is True
    assert sorted(job.adapter) == [f"layers.{i}.self_attn.q_proj.{which}" for i in (0, 1) for which in "ab"]
    a, b = (job.adapter[f"layers.0.self_attn.q_proj.{which}"] for which in "ab")
    assert (a.shape, b.shape) == ((16, 2), (2, 16))
    assert abs(a).max() <= 0.25
    assert not b.any()
    with pytest.raises(UserError, match="does not divide"):
        write_work(tmp_path / "other", PLAIN, work, "cpu", 3)


def test_what_trl_measured_is_read(tmp_path: Path, work: Work) -> None:
    write_work(tmp_path / "trl", PLAIN, work, "cpu", 2)
    measured = {
        "losses": [3.0, 2.5, 2.0, 1.5, 1.2, 1.0],
        "step_seconds": [5.0, 1.0, 1.0, 1.1, 1.2, 1.1],
        "first_step_at": 1012.0,
        "peak_memory_bytes": 2**30,
        "versions": {"trl": "1.0"},
    }
    (tmp_path / "trl/trl.json").write_text(json.dumps(measured))
    run = read_work(BackendRun(backend="trl"), tmp_path / "trl", PLAIN, work, 1000.0, 2)
    assert run.valid
    assert run.steady is not None
    assert run.steady.examples_per_second == pytest.approx(16 / 4.4)
    assert run.first_step_seconds == 12.0
    assert run.peak_rss_bytes == 2**30
    assert run.counts["supervised"] == 24
    for change in ({"losses": [1.0]}, {"step_seconds": [0.0] * 6}, {"versions": None}):
        (tmp_path / "trl/trl.json").write_text(json.dumps(measured | change))
        with pytest.raises(UserError, match=r"trl\.json"):
            read_work(BackendRun(backend="trl"), tmp_path / "trl", PLAIN, work, 1000.0, 2)


def test_what_trl_would_do_otherwise_is_refused() -> None:
    require_able(PLAIN)
    with pytest.raises(UserError) as error:
        require_able(Recipe())
    assert "--set lora.train_control_rows=false" in str(error.value)
    assert '--set optimizer.schedule="constant"' in str(error.value)


def test_trl_runs_where_its_runner_and_an_interpreter_are(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="checkout"):
        find_trainer("trl", root=tmp_path)
    (tmp_path / "bench/peers").mkdir(parents=True)
    (tmp_path / "bench/peers/trl_runner.py").touch()
    with pytest.raises(UserError, match="no interpreter"):
        find_trainer("trl", root=tmp_path)
    found = find_trainer("trl", root=tmp_path, python=Path(sys.executable), device="cpu")
    assert found.command == (str(Path(sys.executable).absolute()), str(tmp_path / "bench/peers/trl_runner.py"))
    assert found.device == "cpu"
    with pytest.raises(UserError, match="TPUs"):
        find_trainer("trl", root=tmp_path, device="tpu")


def test_a_table_keeps_its_columns_whatever_a_trainer_says() -> None:
    lines = table([BackendRun(backend="jax", failure="a | b")]).splitlines()
    assert lines[2].replace("\\|", "").count("|") == lines[0].count("|")


def test_options_are_read() -> None:
    assert parse_backends("jax, xla") == ["jax", "xla"]
    assert parse_overrides(("lora.rank=8", "dtype=float32", "lora.targets=[q_proj]")) == {
        "lora.rank": 8,
        "dtype": "float32",
        "lora.targets": ["q_proj"],
    }
    assert parse_pairs("--python", ("jax=a=b",), ["jax"]) == {"jax": Path("a=b")}
