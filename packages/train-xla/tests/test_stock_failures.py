"""What of the stock stack fails on XLA, and what train-xla does there: the tests behind docs/xla-failures.md.

A test of a failure fails when an upstream release mends it; its message says which of our measures can then go. The
scripts of stock/ run in processes of their own, since torch_xla reads its devices once, on import.
"""

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from portlab_xla.devices import set_environment

# Found, not imported: torch_xla would take hold of this process's devices.
pytestmark = pytest.mark.skipif(importlib.util.find_spec("torch_xla") is None, reason="the failures are torch_xla's")

HERE = Path(__file__).parent
TABLE = HERE.parents[2] / "docs" / "xla-failures.md"
VERSIONS = {
    "torch": "2.9.1",
    "torch_xla": "2.9.0",
    "transformers": "5.23.0",
    "trl": "1.16.0",
    "peft": "0.21.2",
    "accelerate": "1.15.0",
}
SHARD_OUTPUT = {"raised": "ValueError", "says": "Something went wrong, the output of the model shouldn't be `None`"}


@dataclass(frozen=True)
class Run:
    """What a script saw, by the name of the observation, and how it ended."""

    seen: dict[str, Any]
    returncode: int
    stderr: str


def start(script: str, scratch: Path, **environment: str) -> subprocess.Popen[str]:
    # The toy graphs are compiled far more often than they are run: compile them fast.
    flags = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
    inherited = {name: value for name, value in os.environ.items() if name not in ("PJRT_DEVICE", "USE_TORCH_XLA")}
    return subprocess.Popen(
        [sys.executable, str(HERE / "stock" / script)],
        env={**inherited, "XLA_FLAGS": flags, "CPU_NUM_DEVICES": "4", "TMPDIR": str(scratch), **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> Run:
    stdout, stderr = process.communicate(timeout=600)
    lines = [json.loads(line) for line in stdout.splitlines() if line.startswith('{"name"')]
    return Run({line["name"]: line["seen"] for line in lines}, process.returncode, stderr)


def run_spmd(script: str, scratch: Path) -> dict[str, Any]:
    ended = finish(start(script, scratch, PJRT_DEVICE="CPU"))
    assert ended.returncode == 0, ended.stderr[-2000:]
    return ended.seen


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("stock")


@pytest.fixture(scope="module", autouse=True)
def plain_process(scratch: Path) -> Iterator[subprocess.Popen[str]]:
    """Begun before all others, since it mostly waits."""
    with start("plain.py", scratch) as process:
        yield process
        process.kill()


@pytest.fixture(scope="module")
def plain(plain_process: subprocess.Popen[str]) -> Run:
    return finish(plain_process)


@pytest.fixture(scope="module")
def spmd(scratch: Path) -> dict[str, Any]:
    return run_spmd("spmd.py", scratch)


@pytest.fixture(scope="module")
def ours(scratch: Path) -> dict[str, Any]:
    return run_spmd("ours.py", scratch)


def mended(what: str) -> str:
    """The message of a test that no longer sees its failure."""
    return f"the stock stack no longer fails here; see {TABLE.name} and then drop: {what}"


class TestTable:
    @pytest.mark.parametrize("package", VERSIONS)
    def test_is_about_the_installed_versions(self, package: str) -> None:
        assert version(package).partition("+")[0] == VERSIONS[package], f"run this file and bring {TABLE} up to date"

    def test_names_every_test(self) -> None:
        about_failures = [TestFsdpV2, TestAnnotations, TestStep, TestDefaults, TestPeft, TestOurs]
        tests = [name for group in about_failures for name in dir(group) if name.startswith("test_")]
        table = TABLE.read_text()
        assert [name for name in tests if name not in table] == []


class TestFsdpV2:
    def test_optimizer_is_never_created(self, spmd: dict[str, Any]) -> None:
        seen = spmd["optimizer_creation"]
        assert seen == {"raised": "AttributeError", "says": "'NoneType' object has no attribute 'param_groups'"}, (
            mended("the note that Trainer's FSDPv2 cannot be used as it is")
        )

    def test_output_of_gemma4_is_refused(self, spmd: dict[str, Any]) -> None:
        assert spmd["output_of_gemma4"] == SHARD_OUTPUT, mended("annotating outputs by hooks of our own")

    def test_output_of_the_fused_head_is_refused(self, spmd: dict[str, Any]) -> None:
        assert spmd["output_of_the_fused_head"] == SHARD_OUTPUT, mended("annotating outputs by hooks of our own")

    def test_per_device_batch_is_the_global_batch(self, spmd: dict[str, Any]) -> None:
        assert spmd["global_batch"] == {"devices": 4, "world_size": 1, "per_device": 4, "rows_per_step": 4}, mended(
            "setting the batch from the recipe's global batch"
        )

    def test_saved_adapter_loads_as_the_base_model(self, spmd: dict[str, Any]) -> None:
        assert spmd["adapter_of_a_wrapped_model"] == {
            "unwrapped_is": "SpmdFullyShardedDataParallel",
            "key": "base_model.model.model.layers.0._orig_module.self_attn.q_proj.lora_A.weight",
            "trained": True,
            "reloaded_differs_from_base": False,
        }, mended("the save of our own")

    def test_checkpoint_has_wrapped_names(self, spmd: dict[str, Any]) -> None:
        assert spmd["resumed_run"]["key"] == "_orig_module.model.embed_tokens.weight", mended("the save of our own")

    def test_resumed_run_starts_from_the_base_model(self, spmd: dict[str, Any]) -> None:
        seen = spmd["resumed_run"]
        assert (seen["saved_is_base"], seen["resumed_is_base"]) == (False, True), mended("the resume of our own")

    def test_training_unties_the_embedding(self, spmd: dict[str, Any]) -> None:
        assert spmd["resumed_run"]["tied"] is False, mended("placing parameters ourselves")

    def test_checkpoint_is_pickled(self, spmd: dict[str, Any]) -> None:
        pickled = {"optimizer.pt", "pytorch_model.bin", "rng_state.pth", "scheduler.pt", "training_args.bin"}
        assert pickled <= set(spmd["resumed_run"]["files"]), mended("the checkpoint of our own")


class TestAnnotations:
    @pytest.mark.skipif(
        any(importlib.util.find_spec(name) is None for name in ("jax", "flax")),
        reason="torch_xla's torchax is imported only where both are",
    )
    def test_pinned_batches_end_the_run_after_no_step(self, spmd: dict[str, Any]) -> None:
        assert spmd["accelerator_before_the_first_annotation"] == {"available": False}
        assert spmd["pinned_batches"] == {"accelerator": True, "steps": 0}, mended("dataloader_pin_memory=False")


class TestStep:
    def test_bare_loop_reads_nothing_and_settles(self, spmd: dict[str, Any]) -> None:
        """Not a failure: what the two that follow are measured against."""
        seen = spmd["reads_of_a_bare_loop"]
        assert seen["reads_per_step"] == [0, 0, 0, 0]
        assert seen["compiles"][-1] == 2

    def test_mask_is_read_at_every_step(self, spmd: dict[str, Any]) -> None:
        assert min(spmd["reads_of_the_mask"]["reads_per_step"]) >= 1, mended("giving the model its masks ready-made")

    def test_metrics_are_read_at_every_step(self, spmd: dict[str, Any]) -> None:
        extra = min(spmd["reads_of_the_metrics"]["reads_per_step"]) - max(spmd["reads_of_the_mask"]["reads_per_step"])
        assert extra == 5, mended("compute_loss of our own")

    def test_metrics_multiply_compiles(self, spmd: dict[str, Any]) -> None:
        assert spmd["reads_of_the_metrics"]["compiles"][-1] > 3 * spmd["reads_of_a_bare_loop"]["compiles"][-1], mended(
            "compute_loss of our own"
        )

    def test_every_new_length_compiles_again(self, spmd: dict[str, Any]) -> None:
        first, second, third = spmd["compiles_of_new_lengths"]["compiles"]
        assert second - first == third - second > 0, mended("batches of planned shapes")

    def test_gradient_checkpointing_asks_for_torch_dot_xla(self, spmd: dict[str, Any]) -> None:
        assert spmd["gradient_checkpointing"] == {
            "raised": "AttributeError",
            "says": "module 'torch' has no attribute 'xla'",
        }, mended("torch_xla's checkpoint as the model's gradient checkpointing function")

    def test_fused_optimizer_is_refused(self, spmd: dict[str, Any]) -> None:
        seen = spmd["fused_optimizer"]
        assert seen["raised"] == "RuntimeError", mended("the optimiser of our own")
        assert "fused=True" in seen["says"]
        assert seen["says"].endswith("torch.float32 and xla")

    def test_moving_a_model_unties_it(self, spmd: dict[str, Any]) -> None:
        seen = spmd["tied_embeddings"]
        assert seen["tied_before"]
        assert seen["config_says_tied"]
        assert not seen["tied_after"], mended("moving parameters in place")
        assert seen["apart"] > 0.01, mended("moving parameters in place")

    def test_dropping_the_last_batch_drops_evaluation_rows(self, spmd: dict[str, Any]) -> None:
        assert spmd["rows_evaluated"] == {"kept": 10, "dropped": 8}, mended("evaluation batches of our own")

    def test_cache_refuses_rows_shorter_than_the_window(self, spmd: dict[str, Any]) -> None:
        assert spmd["short_rows_without_a_cache"] == {"shape": [4, 8, 512]}
        seen = spmd["short_rows_with_a_cache"]
        assert seen["raised"] == "RuntimeError", mended("use_cache=False")
        assert "Value out of range" in seen["says"]

    @pytest.mark.parametrize("side", ["left", "right"])
    def test_fully_masked_rows_stay_finite(self, spmd: dict[str, Any], side: str) -> None:
        """Not a failure here, unlike in torchax: equal to the CPU."""
        on_cpu, on_xla = (spmd["masked_rows"][f"{side}_{device}"] for device in ("cpu", "xla"))
        assert on_xla["finite_gradients"]
        assert on_xla["loss"] == pytest.approx(on_cpu["loss"], abs=1e-5)


class TestDefaults:
    def test_installed_torch_xla_takes_a_cpu_run(self, plain: Run) -> None:
        assert plain.seen["device_of_a_cpu_run"] == {"device": "xla"}, mended("USE_TORCH_XLA=0 on the plain device")

    def test_default_optimizer_is_the_fused_one(self, plain: Run) -> None:
        fused = {"TrainingArguments": "adamw_torch_fused", "SFTConfig": "adamw_torch_fused"}
        assert plain.seen["default_optimizer"] == fused, mended("the optimiser of our own")

    def test_automatic_padding_pads_nothing(self, plain: Run) -> None:
        assert plain.seen["automatic_padding"] == {"pad_to_multiple_of": None}, mended("batches of planned shapes")

    def test_old_tutorials_call_what_is_gone(self, plain: Run) -> None:
        assert plain.seen["calls_of_old_tutorials"] == {
            "xrt_world_size": False,
            "get_ordinal": False,
            "mark_step": True,
            "xla_device": True,
        }

    def test_one_process_cannot_train_on_four_devices_without_spmd(self, plain: Run) -> None:
        assert plain.returncode != 0, mended("turning SPMD on ourselves")
        assert "one_process_of_four_devices" not in plain.seen
        assert "Expected 4 threads to join the rendezvous, but only 1 of them arrived" in plain.stderr


class TestPeft:
    def test_default_targets_match_nothing_in_gemma4_text(self, plain: Run) -> None:
        assert plain.seen["default_targets_of_gemma4_text"]["raised"] == "ValueError", mended(
            "targets of our own table"
        )

    def test_suffix_targets_reach_the_image_tower_of_gemma4(self, plain: Run) -> None:
        seen = plain.seen["suffix_targets_of_gemma4_with_images"]
        assert seen["raised"] == "ValueError", mended("targets of our own table")
        assert seen["says"].startswith("Target module Gemma4ClippableLinear")


class TestOurs:
    def test_ties_are_kept_and_nothing_is_wrapped(self, ours: dict[str, Any]) -> None:
        assert ours["ties_and_names"] == {"tied": True, "wrapped": []}

    def test_six_lengths_train_with_one_shape(self, ours: dict[str, Any]) -> None:
        seen = ours["graphs_and_reads"]
        assert (seen["steps"], seen["planned"], seen["unplanned"]) == (6, 1, 0)

    def test_numbers_are_read_when_they_are_due(self, ours: dict[str, Any]) -> None:
        assert ours["graphs_and_reads"]["reads_of_three_steps"] <= 3  # loss, accuracy and gradient norm together

    def test_gemma4_trains(self, ours: dict[str, Any]) -> None:
        assert ours["gemma4_trains"] == {"steps": 3, "adapted": 4, "unplanned": 0}

    def test_checkpoint_holds_no_pickle(self, ours: dict[str, Any]) -> None:
        assert {Path(name).suffix for name in ours["checkpoint_files"]["files"]} == {".json", ".safetensors"}

    def test_saved_adapter_is_what_was_trained(self, ours: dict[str, Any]) -> None:
        seen = ours["adapter_in_plain_peft"]
        assert seen["from_device"] < 1e-5
        assert seen["from_base"] > 0.01

    def test_resumed_run_goes_on_as_if_uninterrupted(self, ours: dict[str, Any]) -> None:
        assert ours["resumed_run"] == {"fresh_steps": 3, "same_losses": True}

    def test_every_row_is_evaluated(self, ours: dict[str, Any]) -> None:
        seen = ours["evaluated_rows"]
        assert seen["monitored"] == pytest.approx(seen["of_ten"], abs=1e-5)
        assert seen["monitored"] != pytest.approx(seen["of_eight"], abs=1e-5)

    def test_cpu_run_hides_torch_xla(self) -> None:
        environ = {"PJRT_DEVICE": "CPU"}
        set_environment("cpu", environ)
        assert environ["USE_TORCH_XLA"] == "0"
