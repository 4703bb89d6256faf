"""The command line of `plan-tpu`: what it refuses, prints and exits with; only the last test compiles."""

import importlib.util
import json
import os
import platform
import subprocess
import sys

import pytest
from canned_plans import GIB, TOO_LARGE, CannedCompiler, canned_candidate, canned_program

from portlab_jax.planner.cli import Arguments, main
from portlab_jax.planner.display import details, heading
from portlab_jax.planner.plan import Planned, compile_job
from portlab_jax.planner.program import Program
from portlab_jax.planner.records import Job, Result
from portlab_jax.planner.runs import describe_changes
from portlab_jax.planner.search import changed
from portlab_jax.planner.topology import VARIABLES, prepare_environment, require_compiler
from portlab_jax.planner.workload import find_config, find_workload
from portlab_spec import cli
from portlab_spec.errors import CheckFailed, UserError
from portlab_spec.hardware import parse_slice
from portlab_spec.recipe import Recipe, load_recipe
from portlab_spec.run.command_line import parse_with_recipe


@pytest.fixture(autouse=True)
def unchanged_environment(monkeypatch):
    """The compiler is neither asked for nor prepared: that changes the process for good."""
    monkeypatch.setattr("portlab_jax.planner.cli.prepare_environment", lambda: None)


@pytest.fixture
def run(capsys):
    """Runs the command; returns its exit code, standard output, and standard error in lines."""

    def command(*args):
        with pytest.raises(SystemExit) as end:
            cli.run("plan-tpu", main, args)
        out, err = capsys.readouterr()
        return end.value.code, out, err.splitlines()

    return command


def fitting(monkeypatch):
    return CannedCompiler(lambda recipe: canned_program()).install(monkeypatch)


def too_large(monkeypatch):
    """Nothing fits, and by the analytic model only whole-layer recomputation would."""

    def candidate(changes):
        return canned_candidate(changes, memory=GIB if changes["remat"] == "block" else 99 * GIB)

    return CannedCompiler(lambda recipe: canned_program(**TOO_LARGE), candidate).install(monkeypatch)


class TestBadUsage:
    @pytest.mark.parametrize(
        ("args", "said"),
        [
            (["--slice", "v9-8"], "'v9-8': not a TPU slice. There are v5e-1 to"),
            (["--slice", "v5p-7"], "'v5p-7': no such TPU v5p slice. There are v5p-8,"),
            (["--backend", "torchax", "--search"], "--backend torchax: --search and --infer are about train-jax's"),
            (["--backend", "torchax", "--infer", "decode"], "--backend torchax: --search and --infer are about"),
            (["--backend", "xla"], "--backend: the step of xla cannot be planned:"),
            (["--tries", "0"], "--tries: must be 1 or more"),
            (["--context", "0", "--infer", "decode"], "--context: must be 1 or more"),
            (["--infer", "decode", "--png", "plan.png"], "--infer: goes with none of --search, --html and --png"),
            (["--slice"], "--slice: no slice is named"),
            (["--slice", "v5e-8", "--region", "atlantis"], "no price of v5e for"),
            (["--prices", "nowhere.json"], "nowhere.json"),
            (["--recipe", "gemma9"], "gemma9"),
            (["--accumulate", "3"], "accumulate (3) must divide batch_size (32)"),
        ],
        ids=lambda value: " ".join(value) if isinstance(value, list) else "",
    )
    def test_one_line_says_what_is_wrong(self, run, monkeypatch, args, said):
        fitting(monkeypatch)
        code, out, (line,) = run(*args)
        assert (code, out) == (2, "")
        assert line.startswith("plan-tpu: error: ")
        assert said in line

    def test_targets_without_a_length_mean_nothing(self):
        with pytest.raises(UserError, match="--supervised: says nothing without --length"):
            find_workload(load_recipe("functiongemma-fitness"), supervised=9)

    @pytest.mark.parametrize("supervised", [-1, 128, 500])
    def test_targets_are_fewer_than_tokens(self, supervised):
        with pytest.raises(UserError, match="cannot be targets"):
            find_workload(load_recipe("functiongemma-fitness"), length=128, supervised=supervised)

    def test_rows_longer_than_the_recipe_allows_are_refused(self):
        with pytest.raises(UserError, match=r"--length: rows of 4096 tokens .* Add --max-length 4096"):
            find_workload(Recipe(max_length=1024), length=4096)

    def test_a_model_of_another_family_is_refused_by_name(self, tmp_path):
        sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3"} | dict.fromkeys(sizes, 4)))
        with pytest.raises(UserError, match="model: train-jax computes Gemma's layers itself and has none of qwen3"):
            find_config(str(tmp_path))

    def test_a_recipe_that_training_refuses_is_one_line(self, run, monkeypatch):
        monkeypatch.setattr("portlab_jax.planner.plan.compile_job", lambda job: Result(error="mesh: 3 of 8 devices"))
        assert run("--slice", "v5e-8") == (2, "", ["plan-tpu: error: mesh: 3 of 8 devices"])


class TestTheCompilersPlatform:
    @pytest.mark.parametrize(("system", "machine"), [("Darwin", "arm64"), ("Windows", "AMD64"), ("Linux", "aarch64")])
    def test_elsewhere_one_line_says_where(self, monkeypatch, system, machine):
        monkeypatch.setattr(platform, "system", lambda: system)
        monkeypatch.setattr(platform, "machine", lambda: machine)
        with pytest.raises(UserError, match=rf"Linux on x86-64 alone, and this is {system} on {machine}"):
            prepare_environment({})

    def test_a_missing_libtpu_is_named_with_its_remedy(self, monkeypatch):
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
        with pytest.raises(UserError, match=r"\(libtpu\) is not installed.*portlab-train-jax\[plan\]"):
            require_compiler("Linux", "x86_64")

    def test_neither_a_tpu_nor_a_network_is_looked_for(self, monkeypatch):
        monkeypatch.setattr("portlab_jax.planner.topology.require_compiler", lambda: None)
        environment = {"JAX_PLATFORMS": "tpu", "HOME": "/home"}
        prepare_environment(environment)
        assert environment == {"HOME": "/home", **VARIABLES}
        assert (environment["JAX_PLATFORMS"], environment["TPU_SKIP_MDS_QUERY"]) == ("cpu", "1")

    def test_a_process_that_dies_is_a_failed_check(self, monkeypatch):
        def dies(command, **more):
            return subprocess.CompletedProcess(command, -9, "", "a\n\nKilled by the system\n")

        monkeypatch.setattr(subprocess, "run", dies)
        with pytest.raises(CheckFailed, match=r"v5e-8: .*exit code -9 \(Killed by the system\)"):
            compile_job(Job("train", {}, "v5e-8"))


class TestParsing:
    def test_every_field_of_the_recipe_is_an_option(self):
        args = ["--recipe", "gemma4-31b-lora", "--mesh.fsdp", "4", "--lora.rank", "8", "--slice", "v5p-8", "v6e-8"]
        found = parse_with_recipe(Arguments, args, "plan-tpu")
        assert (found.settings.mesh.fsdp, found.settings.lora.rank) == (4, 8)
        assert found.settings.optimizer == load_recipe("gemma4-31b-lora").optimizer
        assert found.slice == ("v5p-8", "v6e-8")

    def test_nothing_given_plans_the_default_recipe_as_it_is(self):
        found = parse_with_recipe(Arguments, [], "plan-tpu")
        assert found == Arguments(load_recipe("functiongemma-fitness"))

    def test_the_equals_sign_names_a_recipe_too(self):
        assert parse_with_recipe(Arguments, ["--recipe=gemma4-31b-lora"], "plan-tpu").settings == load_recipe(
            "gemma4-31b-lora"
        )


class TestOutput:
    def test_what_fits_ends_with_0(self, run, monkeypatch):
        fitting(monkeypatch)
        code, out, _ = run("--slice", "v5e-8")
        assert code == 0
        for line in [
            "v5e-8 is 8 chips (the suffix counts chips), 2x4, 1 host; mesh data 1 x fsdp 8 x tp 1",
            "data: 150 rows of example",
            "HBM per device: 8.00 GiB of 15.75 (arguments 5.00, temporaries 2.00, output 0.50, program 0.50)",
            "per device and step: 1.00 TFLOP, 1.0 GB to and from HBM",
            "collectives over ICI: none",
            "1.00 GiB  bf16[8,65536,1024]  jit(step)/dot_general  model.py:120",
            "arguments per device, GiB: weights 4.00, trained 0.25, optimizer 0.50, batch 0.25",
            "modelled: bound by compute (compute 5.1 ms, HBM 1.2 ms, ICI 0.0 ms)",
            "versions: jax 0.12.0.1, libtpu 0.0.50.1",
            "price: v5e (google,",
        ]:
            assert line in out

    def test_what_does_not_fit_ends_with_1_and_advice(self, run, monkeypatch):
        too_large(monkeypatch)
        code, out, _ = run("--slice", "v5e-8")
        assert code == 1
        assert "mesh data 1 x fsdp 8 x tp 1: DOES NOT FIT" in out
        assert "HBM per device: 20.00 GiB needed of 15.00: 5.00 too much" in out
        assert "would fit by the analytic model: --remat block (1.0 GiB)" in out
        assert "modelled: bound" not in out

    def test_one_slice_that_fits_is_enough(self, run, monkeypatch):
        def compiler(job):
            return CannedCompiler(
                lambda recipe: canned_program(**({} if job.slice == "v6e-8" else TOO_LARGE)), lambda changes: None
            )(job)

        for module in ("plan", "runs"):
            monkeypatch.setattr(f"portlab_jax.planner.{module}.compile_job", compiler)
        code, out, _ = run("--slice", "v5e-8", "v6e-8")
        assert code == 0
        assert out.count("DOES NOT FIT") == 1

    def test_a_refused_slice_says_why(self):
        plan = Planned(parse_slice("v5e-8"), Recipe(), Result(error="mesh.tp: 3 does not divide 8"))
        assert heading(plan).endswith(": refused")
        assert details(plan) == ["mesh.tp: 3 does not divide 8"]

    def test_what_could_not_be_counted_is_said(self, run, monkeypatch):
        program = canned_program(kernels={"jit(step)/splash": 6}, unknown_loops=2)
        CannedCompiler(lambda recipe: program).install(monkeypatch)
        _, out, _ = run("--slice", "v5e-8")
        assert "not counted: FLOPs of the kernels jit(step)/splash (6 runs)" in out
        assert "counted once: 2 loops whose rounds the compiler does not know" in out

    def test_a_search_prints_the_settings_best_first(self, run, monkeypatch):
        def program(recipe):
            return canned_program(flops=4e12 / recipe["mesh"]["fsdp"])

        CannedCompiler(program, lambda changes: canned_candidate(changes, 1e-3)).install(monkeypatch)
        code, out, _ = run("--slice", "v5e-4", "--search", "--tries", "999", "--by", "time")
        headings = [line.partition("; ")[2] for line in out.splitlines() if line.startswith("v5e-4 is")]
        assert code == 0
        assert headings[0] == "mesh data 1 x fsdp 4 x tp 1"
        assert headings[-1].split(" x ")[1] == "fsdp 1"


@pytest.mark.parametrize(
    "changes",
    [
        {"mesh.data": 2, "mesh.fsdp": 4, "mesh.tp": 1},
        {"accumulate": 4, "remat": "block"},
        {"chunk": 128, "pack": True},
        {"chunk": None, "pack": False},
    ],
    ids=describe_changes,
)
def test_changes_are_told_as_options_that_make_them(changes):
    recipe = load_recipe("functiongemma-fitness")
    found = parse_with_recipe(Arguments, describe_changes(changes).split(), "plan-tpu").settings
    assert found == changed(recipe, changes)


def test_json_holds_everything_and_goes_back(run, monkeypatch):
    fitting(monkeypatch)
    code, out, err = run("--slice", "v5e-8", "--json", "--steps", "7")
    (plan,) = json.loads(out)
    assert (code, err) == (0, [])
    assert set(plan) == {
        *("slice", "recipe", "changes", "fits", "error", "data", "hbm", "compiled", "modelled", "price", "advice"),
        *("versions", "evidence", "when"),
    }
    assert plan["slice"] == {
        "name": "v5e-8",
        "explained": "v5e-8 is 8 chips (the suffix counts chips), 2x4, 1 host",
        "chips": 8,
        "devices": 8,
        "hosts": 1,
    }
    assert Recipe.model_validate(plan["recipe"]).steps == 7
    assert plan["hbm"] == {"needed": 8 * GIB, "usable": int(15.75 * GIB)}
    (shape,) = plan["compiled"]["shapes"]
    assert Program.from_json(shape["program"]) == canned_program()
    assert plan["modelled"]["roofline"]["compute"] == pytest.approx(1e12 / 197e12)
    assert plan["price"]["as_of"]
    assert plan["price"]["source"]


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs the TPU compiler (extra plan)")
def test_a_tiny_gemma_is_compiled_for_a_tpu(tmp_path):
    """The real command in a process of its own: a step of two layers for eight chips, in seconds."""
    config = {
        "model_type": "gemma3_text",
        "architectures": ["Gemma3ForCausalLM"],
        "vocab_size": 512,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 128,
        "query_pre_attn_scalar": 128,
        "sliding_window": 64,
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
        "max_position_embeddings": 2048,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    args = ["--model", str(tmp_path), "--slice", "v5e-8", "--length", "128", "--json"]
    done = subprocess.run(
        [sys.executable, "-c", "from portlab_jax.planner.cli import entry; entry()", *args],
        env=os.environ | {"PORTLAB_CACHE": str(tmp_path / "cache")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (plan,) = json.loads(done.stdout)
    (shape,) = plan["compiled"]["shapes"]
    program = Program.from_json(shape["program"])
    assert plan["fits"]
    assert plan["compiled"]["mesh"] == {"data": 8, "fsdp": 1, "tp": 1}
    assert (shape["steps"], shape["positions"]) == (30, 32 * 128)
    # More than the linear layers forward and for the gradient of their inputs, and not many times that.
    linear = 2 * (128 * 128 * (2 + 1 + 1 + 2) + 3 * 128 * 256)
    least = 4 * (32 * 128 / 8) * linear
    assert least < program.flops < 4 * least
    assert program.collectives["all-reduce"] >= 1
    assert program.unknown_loops == 0
