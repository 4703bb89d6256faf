"""Whatever is wrong with an input's bytes: the right output, or one line that says what is wrong.

Files are damaged byte by byte, and, where they hold JSON, value by value, which reaches what bytes seldom do.
"""

import contextlib
import copy
import hashlib
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from portlab_merge.base_model import open_base
from portlab_merge.checkpoint import read_checkpoint
from portlab_merge.diff import contradictions, diff_models, read_claim, side_file_differences
from portlab_merge.overlay import MergeOptions, merge
from portlab_merge.peft_adapter import export_adapter
from portlab_merge.plan import make_plan
from portlab_merge.sources import Given
from portlab_merge.verify import verify_adapter, verify_merged
from portlab_spec.errors import UserError

ODD_VALUES: list[Any] = [
    None, True, False, 0, 1, 2, -1, 3, 1.5, 8, 2**31, 2**63, 10**12, 10**400, -(10**400), 1e308, 5e-324,
    float("nan"), float("inf"), "", "a", "\x00", "\ud800", "../../x", "gs://x", "9" * 40, "NaN", "F32", "I64", "BF16",
    [], [0], [1, 2], [[]], [None], ["a"], {}, {"a": 1}, {"": None}, {"a": {"b": []}},
]  # fmt: skip
JSON_NAMES = (".json", ".zarray", "_METADATA")  # ends of names


@dataclass(frozen=True)
class Damage:
    """One thing done to one file: `how` is the name of a method, the numbers say where, `odd` what to put there."""

    how: str
    at: int
    size: int
    odd: Any

    def apply(self, name: str, data: bytes) -> bytes:
        if self.how.startswith("json"):
            return self._in_json(name, data)
        return getattr(self, f"_{self.how}")(bytearray(data), self.at % (len(data) or 1), 1 + self.size % 9)

    def _flip(self, data: bytearray, at: int, size: int) -> bytes:
        if data:
            data[at] ^= 1 << size % 8
        return bytes(data)

    def _replace(self, data: bytearray, at: int, size: int) -> bytes:
        data[at : at + size] = self.size.to_bytes(9, "little")[:size]
        return bytes(data)

    def _delete(self, data: bytearray, at: int, size: int) -> bytes:
        del data[at : at + size]
        return bytes(data)

    def _insert(self, data: bytearray, at: int, size: int) -> bytes:
        data[at:at] = self.size.to_bytes(9, "little")[:size]
        return bytes(data)

    def _repeat(self, data: bytearray, at: int, size: int) -> bytes:
        data[at:at] = data[at : at + size]
        return bytes(data)

    def _cut(self, data: bytearray, at: int, size: int) -> bytes:
        return bytes(data[:at])

    def _zero(self, data: bytearray, at: int, size: int) -> bytes:
        data[at : at + 8 * size] = bytes(len(data[at : at + 8 * size]))
        return bytes(data)

    def _in_json(self, name: str, data: bytes) -> bytes:
        """Damage a value in the JSON of a file; the header of a safetensors file keeps its data."""
        if name.endswith(".safetensors"):
            end = 8 + int.from_bytes(data[:8], "little")
            header = self._edit(json.loads(data[8:end]))
            return len(header).to_bytes(8, "little") + header + data[end:]
        return self._edit(json.loads(data)) if name.endswith(JSON_NAMES) else data

    def _edit(self, value: Any) -> bytes:
        places = list(_places(value))
        if not places:
            return json.dumps(self.odd).encode()
        parent, key = places[self.at % len(places)]
        if self.how == "json delete":
            del parent[key]
        elif self.how == "json copy":  # from elsewhere in the same file
            other, other_key = places[self.size % len(places)]
            parent[key] = copy.deepcopy(other[other_key])
        elif self.how == "json rename" and isinstance(parent, dict):
            parent[str(self.odd)] = parent.pop(key)
        else:
            parent[key] = self.odd
        return json.dumps(value).encode()


def _places(value: Any) -> Any:
    """Every (container, key) in a JSON value."""
    for key in list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield value, key
        yield from _places(value[key])


DAMAGES = st.builds(
    Damage,
    st.sampled_from(
        ["flip", "replace", "delete", "insert", "repeat", "cut", "zero"]
        + 3 * ["json put", "json copy"]
        + ["json delete", "json rename"]
    ),
    st.integers(0, 2**40),
    st.integers(0, 2**64),
    st.sampled_from(ODD_VALUES),
)


@dataclass
class Case:
    """Inputs that may be damaged, what is done with them, and what holds if no error is raised."""

    folder: Path
    files: list[Path]
    act: Callable[[Path], None]

    def run(self, number: int, damage: Damage) -> None:
        path = self.files[number % len(self.files)]
        good = path.read_bytes()
        try:
            bad = damage.apply(path.name, good)
        except (UnicodeEncodeError, TypeError):
            return  # no file could hold it
        out = self.folder / "out" / "of"
        try:
            path.write_bytes(bad)
            self.act(out)
        except UserError as error:
            line, left = str(error), list(out.parent.iterdir())
            assert line
            assert not left
        finally:
            path.write_bytes(good)
            shutil.rmtree(out.parent)
            out.parent.mkdir()


def content(folder: Path) -> dict[str, str]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def weights(folder: Path) -> dict[str, str]:
    return {name: digest for name, digest in content(folder).items() if name.endswith(".safetensors")}


def files_in(*folders: Path) -> list[Path]:
    """Files to damage, those that hold JSON more often."""
    found = sorted(path for folder in folders for path in folder.rglob("*") if path.is_file() and path.stat().st_size)
    found = [path for path in found if path.name not in ("tokenizer.json", "README.md", "_sharding")]
    return found + [path for path in found if path.name.endswith((*JSON_NAMES, ".safetensors"))]


def plan_of(base: Path, run: Path, alpha: float | None = None):
    return make_plan(open_base(base), read_checkpoint(run, given=Given(alpha=alpha)))


@pytest.fixture(scope="module")
def small_base(make_base, tmp_path_factory):
    return make_base(max_shard_size="60KB")


@pytest.fixture(scope="module")
def make_case(small_base, make_tree, describe, save, tmp_path_factory):
    """A case by its name."""

    def prepare(name: str) -> tuple[Path, Path, Path]:
        folder = tmp_path_factory.mktemp("fuzz")
        (folder / "out").mkdir()
        shutil.copytree(small_base, folder / "base")
        return folder, folder / "base", folder / "run"

    def ours(name: str) -> Case:
        """Everything is digested: the output is the right one, or there is none."""
        layout = {"ocdbt": "ocdbt" in name, "zarr3": "zarr3" in name}
        folder, base, run = prepare(name)
        tree = make_tree(base)
        save(run / "checkpoints", tree, describe(base, tree), **layout)
        merge(plan_of(base, run), folder / "right", MergeOptions())
        right = content(folder / "right")
        lora = plan_of(base, run).checkpoint.adapter.record["lora"]

        def act(out: Path) -> None:
            plan = plan_of(base, run)
            merge(plan, out, MergeOptions())
            assert verify_merged(plan, out) == []
            if plan.checkpoint.adapter.record["lora"] == lora:  # no digest guards it, as it is written last
                assert weights(out) == {n: digest for n, digest in right.items() if n.endswith(".safetensors")}
                assert (out / "config.json").read_bytes() == (base / "config.json").read_bytes()
                index, whole = (json.loads((f / INDEX).read_text()) for f in (out, folder / "right"))
                assert index["weight_map"] == whole["weight_map"]
                assert index["metadata"]["total_size"] == whole["metadata"]["total_size"]

        return Case(folder, files_in(run, *([base] if name == "ocdbt" else [])), act)

    def foreign(name: str) -> Case:
        """Nothing is digested: the output is what the inputs say, damaged or not."""
        folder, base, run = prepare(name)
        random = np.random.default_rng(3)
        path, heads, item, metadata, alpha = FOREIGN[name]
        tree: dict[str, Any] = {}
        for side, shape in (("a", (48, 4)), ("b", (4, *heads))):
            node = tree
            for key in path[:-1]:
                node = node.setdefault(key, {})
            node[path[-1] + side] = random.normal(0, 0.3, shape).astype(np.float32)
        save(run, tree, metadata, ocdbt=False)
        (run / "7" / "adapter").rename(run / "7" / item)

        def act(out: Path) -> None:
            plan = plan_of(base, run, alpha)
            merge(plan, out, MergeOptions())
            assert verify_merged(plan, out) == []

        return Case(folder, files_in(base, run), act)

    def peft(name: str) -> Case:
        folder, base, run = prepare(name)
        tree = make_tree(base)
        save(folder / "trained", tree, describe(base, tree))
        export_adapter(plan_of(base, folder / "trained"), run)

        def act(out: Path) -> None:
            plan = plan_of(base, run)
            merge(plan, out, MergeOptions(dtype="float32", max_shard_size=50_000))
            assert verify_merged(plan, out) == []
            export_adapter(plan, out.with_name("adapter"))
            assert verify_adapter(plan, out.with_name("adapter")) == []

        return Case(folder, files_in(base, run), act)

    def written(name: str) -> Case:
        """What we wrote ourselves is damaged: verify and diff say so or are right to be content."""
        folder, base, run = prepare(name)
        tree = make_tree(base)
        save(run, tree, describe(base, tree))
        plan = plan_of(base, run)
        merged, adapter = folder / "merged", folder / "adapter"
        merge(plan, merged, MergeOptions())
        export_adapter(plan, adapter)
        right, before = open_base(merged), weights(merged)

        def compare() -> None:
            claim = read_claim(merged)
            other = open_base(merged)
            side_file_differences(right, other)
            limit = max(8, claim.rank)
            contradictions(diff_models(plan.base, other, limit), claim)

        def verify() -> None:
            if not verify_merged(plan, merged):
                assert weights(merged) == before
                assert open_base(merged).config == right.config
                assert open_base(merged).index["weight_map"] == right.index["weight_map"]

        def act(out: Path) -> None:
            for check in (compare, verify, lambda: verify_adapter(plan, adapter)):
                with contextlib.suppress(UserError):
                    check()

        return Case(folder, files_in(merged, adapter), act)

    kinds = {**dict.fromkeys(FOREIGN, foreign), "peft": peft, "written": written}
    return lambda name: kinds.get(name, ours)(name)


INDEX = "model.safetensors.index.json"
# The query of layer 0 as other trainers store it: path, axes of B, item, metadata, and the alpha that has to be given.
FOREIGN: dict[str, tuple[tuple[str, ...], tuple[int, ...], str, dict[str, Any] | None, float | None]] = {
    "tunix": (("layers", "0", "attn", "q_einsum", "w_lora_"), (4, 16), "model_params", None, 8.0),
    "maxtext": (
        ("params", "params", "decoder", "layers_0", "self_attention", "query", "kernel_lora_"),
        (64,),
        "items",
        {"lora": {"lora_rank": 4, "lora_alpha": 8.0}, "scan_layers": False},
        None,
    ),
    "gemma": (("layer_0", "attn", "q_einsum", "_LoRAEinsum_0", "lora", ""), (4, 16), "default", None, None),
}
CASES = ["ocdbt", "ocdbt zarr3", "zarr2", "zarr3", *FOREIGN, "peft", "written"]


@pytest.fixture(scope="module", params=CASES)
def case(request, make_case):
    return make_case(request.param)


EXAMPLES = 120
CHECKS = {"deadline": None, "suppress_health_check": [HealthCheck.function_scoped_fixture]}


def test_undamaged_inputs_are_converted(case):
    case.act(case.folder / "out" / "of")
    shutil.rmtree(case.folder / "out")
    (case.folder / "out").mkdir()


@settings(max_examples=EXAMPLES, **CHECKS)
@given(number=st.integers(0, 10**6), damage=DAMAGES)
def test_damage_is_named_or_does_no_harm(case, number, damage):
    case.run(number, damage)


@pytest.mark.slow
@settings(max_examples=3000, **CHECKS)
@given(number=st.integers(0, 10**6), damage=DAMAGES)
def test_much_damage_is_named_or_does_no_harm(case, number, damage):
    case.run(number, damage)
