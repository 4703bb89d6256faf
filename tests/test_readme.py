"""The README's commands exist and do what it says, as far as that takes seconds; the rest is what CI itself runs."""

import functools
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCS = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted(ROOT.glob("packages/*/README.md")),
]
DOCS.remove(ROOT / "docs" / "messages.md")  # sentences with parts left out, written from the code
NOXFILE = (ROOT / "noxfile.py").read_text()
SESSIONS = set(re.findall(r'^def (\w+)\(session|^    "(\w+)": Benchmark\(', NOXFILE, re.MULTILINE))
SESSIONS = {name for pair in SESSIONS for name in pair if name}


def commands(document: Path) -> list[str]:
    blocks = re.findall(r"```(?:bash|sh|console)\n(.*?)```", document.read_text(), re.DOTALL)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    return [line.removeprefix("$ ").split("  #")[0].strip() for line in lines if line.strip()]


def test_the_two_commands_stand_in_the_readme():
    text = (ROOT / "README.md").read_text()
    assert "python3 -m pip install nox uv && python3 -m nox -s train_jax" in text
    assert "python3 -m pip install nox uv && python3 -m nox -s tests" in text


def test_ci_runs_the_readmes_test_command():
    assert "python3 -m pip install nox uv && python3 -m nox -s tests" in (ROOT / ".ci" / "run").read_text()


@pytest.mark.parametrize("document", DOCS, ids=lambda p: str(p.relative_to(ROOT)))
def test_every_nox_session_named_in_the_docs_exists(document):
    named = set(re.findall(r"nox -s (\w+)", document.read_text()))
    assert named <= SESSIONS


PROGRAMS = {
    "fitnesscoach": "fitnesscoach",
    "train-jax": "portlab_jax",
    "train-torchax": "portlab_torchax",
    "train-xla": "portlab_xla",
    "plan-tpu": "portlab_jax.planner",
    "merge-ckpt": "portlab_merge",
    "portlab-bench": "portlab_bench",
    "portlab-port": "portlab_port",
}
WITH_COMMANDS = ("fitnesscoach", "merge-ckpt", "portlab-bench")


@pytest.mark.parametrize("document", DOCS, ids=lambda p: str(p.relative_to(ROOT)))
def test_every_option_named_in_the_docs_exists(document):
    """Options in shell blocks are accepted by the command they are given to."""
    for line in commands(document):
        for program, module in PROGRAMS.items():
            words = shlex.split(line)
            if words[:1] == [program] or words[:5] == ["python3", "-m", "nox", "-s", program.replace("-", "_")]:
                if program in WITH_COMMANDS and len(words) > 1 and not words[1].startswith("-"):
                    page = help_of(module, words[1])
                else:
                    page = help_of(module)
                for option in (w.partition("=")[0] for w in words if w.startswith("--") and len(w) > 2):
                    assert option in page or option == "--debug", f"{line}: {option}"


@functools.cache
def help_of(module: str, *words: str) -> str:
    # Command lines need nothing of what their trainers do, which have environments of their own.
    path = os.pathsep.join(str(source) for source in ROOT.glob("packages/*/src"))
    done = subprocess.run(
        [sys.executable, "-m", module, *words, "--help"],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("document", DOCS, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_between_documents_lead_somewhere(document):
    for target in re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", document.read_text()):
        if not target.startswith(("http://", "https://")):
            assert (document.parent / target).exists(), target


def test_every_recipe_key_is_documented():
    from portlab_spec.recipe import field_names

    text = (ROOT / "docs" / "recipes.md").read_text()
    assert not [name for name in field_names() if f"`{name}`" not in text]


def test_figures_in_the_docs_come_from_committed_results():
    """The tables of docs/results.md hold the numbers of bench/results, to the shown precision."""
    import json

    text = (ROOT / "docs" / "results.md").read_text()
    step = json.loads((ROOT / "bench/results/bench_step.json").read_text())
    for name, ratio in step["ratios"].items():
        assert f"{ratio:.1f}x" in text, name
    train = json.loads((ROOT / "bench/results/bench_train.json").read_text())
    for name, figures in train["figures"].items():
        rows, contender = name.split(": ")
        shown = f"| {rows} | {contender} | {figures['examples_per_second']:.2f} |"
        row = next(line for line in text.splitlines() if line.startswith(shown))
        assert row.endswith(f"| {figures['peak_memory_bytes'] / 2**30:.2f} |")
    for name, ratio in train["ratios"].items():
        assert f"{ratio:.2f}" in text or f"{ratio:.1f}" in text, name
    seeds = json.loads((ROOT / "bench/results/seeds.json").read_text())
    assert f"{seeds['mean_after']['call_exact']:.1%}" in text
    for report in seeds["reports"]:
        metric = report["after"]["metrics"]["call_exact"]
        assert f"{metric['hits']}/{metric['count']}" in text
    spec = json.loads((ROOT / "bench/results/bench_spec.json").read_text())
    for name, figures in spec["figures"].items():
        assert f"| {name} | {figures['rows_per_minute']:,.0f} |" in text
    assert all(f"{ratio:.1f}x" in text for ratio in spec["ratios"].values())
    trip = json.loads((ROOT / "bench/results/bench_roundtrip.json").read_text())["figures"]["portlab"]
    assert not trip["faults"]
    assert f"{trip['conversations']:,} in {trip['seconds']:.0f} s" in text
    bfcl = json.loads((ROOT / "bench/results/bfcl_agreement.json").read_text())["figures"].values()
    agree, compared = (sum(figures[key] for figures in bfcl) for key in ("agree", "compared"))
    assert f"{agree:,} of {compared:,} agree" in text


def test_figures_of_training_on_xla_come_from_committed_results():
    """And static shapes are worth what the docs say of them."""
    import json

    text = (ROOT / "docs" / "results.md").read_text()
    result = json.loads((ROOT / "bench/results/bench_xla.json").read_text())
    for name, figures in result["figures"].items():
        part, contender = name.split(": ", 1)
        shown = (
            f"| {part} | {contender} | {figures['examples_per_second']:.2f} | {1 / figures['steps_per_second']:.2f} |"
        )
        assert any(line.startswith(shown) for line in text.splitlines()), shown
    for contender in ("train-xla cpu", "train-xla xla, 1 device", "train-xla xla, 4 devices"):
        assert f"{result['ratios'][f'speed: {contender} / trl']:.1f}x" in text
    one, each = (result["figures"][f"padding: {name}"]["device"] for name in PADDED)
    assert (one["shapes"], each["shapes"] > 1) == (1, True)
    assert each["compilations"] - one["compilations"] == each["shapes"] - 1


def test_figures_of_training_through_torchax_come_from_committed_results():
    import json

    text = (ROOT / "docs" / "results.md").read_text()
    result = json.loads((ROOT / "bench/results/bench_torchax.json").read_text())
    for name, figures in result["figures"].items():
        part, contender = name.split(": ", 1)
        shown = (
            f"| {part} | {contender} | {figures['examples_per_second']:.2f} | {1 / figures['steps_per_second']:.2f} |"
        )
        assert any(line.startswith(shown) for line in text.splitlines()), shown
    for one in ("train-torchax", "train-torchax, padded rows"):
        for other in ("torchax's loop", "torchax's loop, jitted"):
            assert f"{result['ratios'][f'speed: {one} / {other}']:.1f}x" in text


PADDED = ("padded to one length", "padded to each batch's length")


def test_figures_of_planning_come_from_committed_results():
    """And FLOPs read off compiled programs are those that the model table says, where every loop's rounds are known."""
    import json

    text = (ROOT / "docs" / "planning.md").read_text()
    result = json.loads((ROOT / "bench/results/bench_slices.json").read_text())
    for name, figures in result["figures"].items():
        program = figures["shapes"][0]["program"]
        if not figures["fits"]:
            needed, usable = (figures[key] / 2**30 for key in ("hbm_needed", "hbm_usable"))
            assert f"{name} needs {needed:.2f} GiB of {usable:.2f}" in text
            continue
        ratio = result["ratios"][f"{name}: FLOPs, compiled / analytic"]
        assert ratio == pytest.approx(1, rel=0.1 if program["unknown_loops"] else 0.02)
        row = next(line for line in text.splitlines() if line.startswith(f"| {name} |"))
        shown = (f"{figures['hbm_needed'] / 2**30:.2f} of ", f"{program['flops'] / 1e12:,.2f} | {ratio:.3f}")
        assert all(part in row for part in shown)
        assert program["compile_seconds"] < 600
        assert program["peak_rss_bytes"] < 12 * 2**30


def test_figures_of_merging_come_from_committed_results():
    """And the aims hold that any machine can meet: memory, rounding, nothing else touched, twice as fast as a peer."""
    import json

    text = (ROOT / "docs" / "results.md").read_text()
    result = json.loads((ROOT / "bench/results/bench_merge.json").read_text())
    for name, figures in result["figures"].items():
        row = f"| {name.replace(': ', ' | ')} | {figures['seconds']:.1f} | {figures['median_seconds']:.1f} |"
        assert any(line.startswith(row) for line in text.splitlines()), row
        if name.endswith(": portlab"):
            assert figures["peak_memory_bytes"] < 300 * 2**20
            assert figures["misrounded_share"] < 1e-5
            assert figures["other_tensors_identical"] == figures["other_tensors"] > 0
    peers = [ratio for name, ratio in result["ratios"].items() if re.search(r"seconds: \w+ / portlab", name)]
    assert min(peers) > 2
    serve = json.loads((ROOT / "bench/results/serve_merged.json").read_text())["figures"]
    for name, figures in serve.items():
        assert figures["merged beside transformers"]["equal answers"] == 1
        assert f"| {name} | 6 of 6 |" in text


def test_figures_of_grammars_and_parsers_come_from_committed_results():
    import json

    grammar = (ROOT / "docs" / "grammar.md").read_text()
    for figures in json.loads((ROOT / "bench/results/bench_grammar.json").read_text())["figures"].values():
        assert (
            f"| {figures['compile_ms']:.1f} | {figures['mask_us_median']:,.0f} | {figures['mask_us_mean']:,.0f} |"
            in grammar
        )
    parsing, results = ((ROOT / "docs" / name).read_text() for name in ("parsing.md", "results.md"))
    measured = json.loads((ROOT / "bench/results/bench_parsers.json").read_text())["figures"]
    for figures in measured.values():
        cells = [f"{part[key]} of {part['count']}" for key, part in _parts(figures)]
        assert any(_holds(line, [*cells, f"| {figures['wrong calls']} |"]) for line in parsing.splitlines())
    assert f"{measured['vLLM 0.33.0']['wrong calls']} wrong calls" in results


def test_figures_of_batching_come_from_committed_results():
    import json

    text = (ROOT / "docs" / "batching.md").read_text()
    figures = json.loads((ROOT / "bench/results/bench_data.json").read_text())["figures"]
    for name, found in figures["leaks"].items():
        assert f"| {name} | {found['seconds']:.1f} | {found['near pairs']:,} |" in text
    for count, share in figures["bfcl"]["padding"].items():
        assert re.search(rf"\| {count} buckets? \| {share:.0%} \|", text)
    for name, found in figures["prompts"].items():
        assert f"| {name} | " in text
        assert f"{found['not computed']:.0%} |" in text


def test_the_example_of_tree_packing_is_what_packing_makes_of_it():
    from portlab_spec.data.tokens import Row
    from portlab_spec.packing import Packing, pack_batch, plan

    text = (ROOT / "docs" / "shared-prefix.md").read_text()
    given = re.search(r"Four short\s+rows, (.*?), are held as", text, re.DOTALL)
    rows = [
        Row(ids, tuple(map(int, ids.split())), (False,) * ids.count(" ") + (True,))
        for ids in re.findall(r"`([\d ]+)`", given[1])
    ]
    assert len(rows) == 4
    packed = pack_batch(rows, plan([rows], Packing(min_shared=1)).layout(0)).rows
    for name, array in packed._asdict().items():
        (shown,) = re.findall(rf"^{name} +([\d ]+)$", text, re.MULTILINE)
        shown = [int(number) for number in shown.split()]
        assert array.ravel()[: len(shown)].tolist() == shown


def test_the_token_counts_of_tree_packing_are_those_of_the_fitness_recipe():
    from portlab_spec.assets import default_model
    from portlab_spec.data import load_dataset
    from portlab_spec.data.tokens import tokenize
    from portlab_spec.formats import FORMATS
    from portlab_spec.models import GemmaConfig
    from portlab_spec.packing import BatchOrder, Packing, plan
    from portlab_spec.recipe import load_recipe
    from portlab_spec.tokenizer import Tokenizer

    recipe, folder = load_recipe("functiongemma-fitness"), default_model().path
    train = [c for c in load_dataset(recipe.data) if c.split in recipe.train_splits]
    rows = tokenize(train, FORMATS[recipe.format], Tokenizer.load(folder), recipe.max_length)
    order = BatchOrder(rows, recipe.batch_size, recipe.steps, recipe.seed)
    window = GemmaConfig.load(folder).window
    shared = plan(order, Packing(window=window))
    counts = {
        "as they are": shared.row_tokens,
        "held in trees": shared.held_tokens,
        "computed, padding included, in one shape": shared.computed_tokens,
        "packed without sharing": plan(order, Packing(window=window, share_prefix=False)).computed_tokens,
        "padded one by one": plan(order, Packing(window=window, share_prefix=False, pack=False)).computed_tokens,
    }
    text = (ROOT / "docs" / "shared-prefix.md").read_text()
    for name, count in counts.items():
        assert f"| {name} | {count:,} |" in text


def test_the_training_page_names_every_choice_of_the_recipe():
    from typing import get_args

    from portlab_spec.recipe import Recipe
    from portlab_spec.run.signals import WATCHED

    text = (ROOT / "docs" / "training.md").read_text()
    for policy in get_args(Recipe.model_fields["remat"].annotation):
        assert f"| `{policy}` |" in text
    for number in WATCHED:
        assert re.search(rf"^\| {number.name}.*\| {128 + number} \|$", text, re.MULTILINE)
    formula = (ROOT / "packages/spec/src/portlab_spec/models/flops.py").read_text()
    for line in re.findall(r"^(?:LoRA|full) step .*$", text, re.MULTILINE):
        assert line in formula


def _parts(figures):
    return [
        (key, figures[part]) for key, part in (("right", "grammar"), ("read", "deviations"), ("refused", "refusals"))
    ]


def _holds(line, cells):
    return all(cell in line for cell in cells)


def test_paths_in_the_guide_for_contributors_exist():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    paths = set(re.findall(r"(?:packages|tests|docs|bench)/[\w./-]*\w", text))
    assert len(paths) > 8
    assert [path for path in paths if not (ROOT / path).exists()] == []
