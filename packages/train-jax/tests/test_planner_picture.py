"""Plans as a picture and as a page: what is drawn, what is named, and that the page needs nothing else."""

import re
from datetime import date
from html.parser import HTMLParser

import pytest

from portlab_jax.planner.breakdown import best, memory_by_kind, time_by_bound
from portlab_jax.planner.buffers import Buffer
from portlab_jax.planner.estimate import estimate
from portlab_jax.planner.picture import draw, html
from portlab_jax.planner.plan import Planned
from portlab_jax.planner.program import Program, ProgramMemory
from portlab_jax.planner.records import Result
from portlab_spec.hardware import parse_slice
from portlab_spec.prices import Price
from portlab_spec.recipe import Recipe

GIB = 2**30
ARGUMENTS = {"weights": 8 * GIB, "trained": GIB // 4, "optimizer": GIB // 2, "batch": GIB // 256}
PRICE = Price(
    sku="v6e",
    provider="google",
    region="us-east1",
    plan="on_demand",
    usd_per_hour=2.7,
    unit="chip",
    as_of=date(2026, 9, 17),
    source="https://cloud.google.com/tpu/pricing",
)


def compiled(temporaries=6 * GIB, **changes):
    arguments = sum(ARGUMENTS.values())
    memory = ProgramMemory(arguments, temporaries, GIB // 8, GIB // 16, arguments + temporaries + GIB // 4)
    figures = {
        "memory": memory,
        "needed": memory.peak,
        "limit": None,
        "flops": 40e12,
        "bytes": 30e9,
        "compiler_flops": 4e12,
        "collectives": {"all-gather": 120},
        "sent": {"all-gather": 8 * 10**9},
        "kernels": {},
        "unknown_loops": 0,
        "largest": (Buffer(GIB, "bf16[8,2048,5376]", "jit(step)/while/body/dot_general", "model.py:120"),),
        "lower_seconds": 4.0,
        "compile_seconds": 61.0,
        "peak_rss_bytes": 6 * GIB,
    }
    return Program(**figures | changes)


TOO_LARGE = {"memory": None, "needed": 40 * GIB, "limit": int(31.25 * GIB), "collectives": {}, "sent": {}}


def planned(*programs, slice="v6e-8", error="", recipe=None, price=PRICE, **changes):
    """A plan of programs, 10 steps each, as the planner makes it."""
    part, recipe = parse_slice(slice), recipe or Recipe(name="example", model="google/gemma-4-31B-it", steps=200)
    if error:
        return Planned(part, recipe, Result(error=error), price=price)
    step = {"steps": 10, "positions": 16384, "slots": 1024, "attention": {"full": "splash", "sliding": "xla"}}
    training = {
        "mesh": {"data": 1, "fsdp": 8, "tp": 1},
        "arguments": ARGUMENTS,
        "shapes": [step | {"program": program.to_json()} for program in programs],
    }
    result = Result(programs=training, source="150 rows of example", versions={"jax": "0.12.0.1"})
    plan = Planned(part, recipe, result, price=price, **changes)
    if not plan.fits:
        return plan
    guess = estimate(plan.shapes, part, rows=32, tokens=16000.0, steps=recipe.steps, price=price)
    return Planned(part, recipe, result, estimate=guess, price=price, **changes)


FITS = planned(compiled())
DOES_NOT_FIT = planned(compiled(**TOO_LARGE), advice=(("--remat block", 20.0 * GIB),))
REFUSED = planned(error="--mesh.tp: 3 does not divide 8 heads. Choose 2")
TWO_SHAPES = planned(compiled(), compiled(temporaries=9 * GIB), slice="v5p-8", price=None)


def many(count):
    return [planned(compiled(flops=1e12 * (number + 1))) for number in range(count)]


class TestWhatIsShown:
    def test_kinds_of_memory_add_up_to_what_the_compiler_says_is_needed(self):
        kinds = memory_by_kind(FITS)
        assert sum(kinds.values()) == FITS.needed
        assert kinds["temporaries"] == 6 * GIB
        assert kinds["program"] == GIB // 16

    def test_the_shape_that_needs_most_is_shown(self):
        assert memory_by_kind(TWO_SHAPES)["temporaries"] == 9 * GIB

    def test_of_a_program_that_does_not_fit_only_arguments_are_told_apart(self):
        assert memory_by_kind(DOES_NOT_FIT) == ARGUMENTS | {"not split": 40 * GIB - sum(ARGUMENTS.values())}

    def test_a_refused_plan_has_neither_memory_nor_time(self):
        assert memory_by_kind(REFUSED) == {}
        assert time_by_bound(REFUSED) == {}

    def test_times_are_those_of_the_roofline(self):
        times = time_by_bound(FITS)
        assert times["compute"] == pytest.approx(40e12 / 918e12)
        assert times["hbm"] == pytest.approx(30e9 / 1638e9)
        assert times["ici"] == FITS.estimate.roofline.ici

    def test_plans_that_fit_come_first_and_keep_their_order(self):
        first, second = many(2)
        assert best([DOES_NOT_FIT, first, REFUSED, second]) == [first, second, DOES_NOT_FIT, REFUSED]

    def test_eight_plans_are_shown_of_many(self):
        plans = many(12)
        assert best(plans) == plans[:8]


CASES = {
    "one": [FITS],
    "several shapes": [TWO_SHAPES],
    "does not fit": [DOES_NOT_FIT],
    "refused among others": [FITS, REFUSED, DOES_NOT_FIT, TWO_SHAPES],
    "many": many(12),
}


class TestThePicture:
    @pytest.mark.parametrize("plans", CASES.values(), ids=CASES)
    def test_is_a_png(self, plans, tmp_path):
        draw(plans, tmp_path / "plan.png")
        assert (tmp_path / "plan.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"

    def test_grows_with_the_number_of_plans_up_to_eight(self, tmp_path):
        heights = []
        for count in (1, 8, 12):
            draw(many(count), tmp_path / "plan.png")
            heights.append(int.from_bytes((tmp_path / "plan.png").read_bytes()[20:24]))
        assert heights[0] < heights[1] == heights[2]


class Page(HTMLParser):
    """What a page holds: its elements with their attributes, its text, and whether every element is closed."""

    VOID = ("meta", "br", "hr", "img", "link", "input")

    def __init__(self, text):
        super().__init__()
        self.elements, self.words, self._open = [], [], []
        self.feed(text)
        assert not self._open

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self._open.append(tag)

    def handle_endtag(self, tag):
        assert self._open.pop() == tag

    def handle_data(self, data):
        if self._open[-1:] != ["style"]:
            self.words.append(data)

    @property
    def text(self):
        return " ".join(" ".join(self.words).split())

    def named(self, tag):
        return [attributes for name, attributes in self.elements if name == tag]


class TestThePage:
    @pytest.mark.parametrize("plans", CASES.values(), ids=CASES)
    def test_is_well_formed(self, plans):
        assert Page(html(plans)).named("main")

    @pytest.mark.parametrize("plans", CASES.values(), ids=CASES)
    def test_loads_nothing_and_runs_nothing(self, plans):
        text = html(plans)
        page = Page(text)
        assert not {tag for tag, _ in page.elements} & {"script", "link", "img", "iframe", "object", "embed", "base"}
        attributes = {name for _, found in page.elements for name in found}
        assert not attributes & {"src", "href", "srcset", "xlink:href", "style"}
        assert not [name for name in attributes if name.startswith("on")]
        assert "@import" not in text
        assert set(re.findall(r"url\(([^)]*)\)", text)) <= {"#hatch"}

    def test_forbids_the_browser_to_load_anything(self):
        policies = [m["content"] for m in Page(html([FITS])).named("meta") if "http-equiv" in m]
        assert policies == ["default-src 'none'; style-src 'unsafe-inline'"]

    def test_text_from_outside_is_escaped(self):
        hostile = '<script>alert("1")</script>&amp;'
        largest = (Buffer(GIB, hostile, hostile, hostile),)
        recipe = Recipe(name=hostile, model=hostile)
        plans = [
            planned(compiled(largest=largest), recipe=recipe, changes={"remat": hostile}),
            planned(error=hostile),
            planned(compiled(**TOO_LARGE), advice=((hostile, 1.0),)),
        ]
        page = Page(html(plans))
        assert not page.named("script")
        assert page.text.count(hostile) >= 8

    def test_every_figure_says_what_it_rests_on(self):
        text = html([FITS])
        page = Page(text)
        headings = re.findall(r"<h2>([^<]*)</h2>", text)
        assert headings == [
            "Memory by kind, compiled",
            "Time by bound, modelled",
            "Cost, modelled",
            "What was compiled",
            "What this rests on",
        ]
        for claim in (
            "HBM per device, GiB compiled",
            "step, ms modelled",
            "cost modelled",
            "chip and hour published",
            "matrix products 40.00 TFLOP compiled",
            "token positions, all devices 16,384 counted",
            "compiling 61.0 s this computer",
            "Nothing here was measured",
        ):
            assert claim in page.text

    def test_bars_say_their_figures(self):
        text = Page(html([FITS])).text
        assert "weights: 8.00 GiB, compiled" in text
        assert "compute: 43.6 ms, modelled" in text

    def test_the_price_comes_with_its_day_and_source(self):
        text = Page(html([FITS])).text
        assert "2026-09-17" in text
        assert "https://cloud.google.com/tpu/pricing" in text

    def test_versions_of_the_compiler_are_named(self):
        assert "jax 0.12.0.1" in Page(html([FITS])).text

    def test_a_plan_without_a_price_has_a_time_and_no_cost(self):
        text = Page(html([TWO_SHAPES])).text
        assert "no price" in text
        assert "Fastest: v5p-8" in text
        assert "Cheapest" not in text

    def test_what_does_not_fit_is_struck_through_and_says_what_would(self):
        page = Page(html([DOES_NOT_FIT]))
        assert "Nothing fits." in page.text
        assert "40.00 of 31.25: does not fit" in page.text
        assert "it would fit with --remat block (20.0 GiB, modelled)" in page.text
        assert [r for r in page.named("rect") if r.get("fill") == "url(#hatch)"]

    def test_what_fits_is_not_struck_through(self):
        assert not [r for r in Page(html([FITS])).named("rect") if r.get("fill") == "url(#hatch)"]

    def test_a_refused_plan_says_why(self):
        assert "--mesh.tp: 3 does not divide 8 heads. Choose 2" in Page(html([FITS, REFUSED])).text

    def test_every_shape_of_the_step_has_a_table(self):
        assert html([TWO_SHAPES]).count("The step's shape of 10 steps") == 2

    def test_loops_and_kernels_that_the_count_does_not_see_are_named(self):
        text = Page(html([planned(compiled(unknown_loops=2, kernels={"ring_attention": 60}))])).text
        assert "loops of unknown length, counted once 2" in text
        assert "kernels whose FLOPs are not counted ring_attention (60 runs)" in text

    def test_all_plans_are_listed_and_eight_are_detailed(self):
        text = html(many(12))
        assert text.count("<h3>") == 8
        assert "12 of 12 plans fit." in text
        assert "Below are the best 8." in text

    def test_adapts_to_dark_screens_small_screens_and_paper(self):
        text = html([FITS])
        assert Page(text).named("meta")[2] == {"name": "viewport", "content": "width=device-width, initial-scale=1"}
        for query in ("(prefers-color-scheme: dark)", "(max-width: 40rem)", "print"):
            assert f"@media {query}" in text
