"""Which settings a search considers, compiles, and recommends; the compiler's answers are canned."""

import itertools

import pytest
from canned_plans import GIB, TOO_LARGE, CannedCompiler, canned_candidate, canned_program, canned_result
from pydantic import ValidationError

from portlab_jax.planner.analytic import Analytic
from portlab_jax.planner.estimate import Estimate, Roofline
from portlab_jax.planner.plan import Planned
from portlab_jax.planner.records import Result
from portlab_jax.planner.runs import Wishes, advised, plan_all, search_slice, worth
from portlab_jax.planner.search import (
    Candidate,
    changed,
    lower_bound,
    meshes,
    variants,
    within,
    without_repeats,
)
from portlab_spec.errors import UserError
from portlab_spec.hardware import parse_slice
from portlab_spec.recipe import Mesh, Recipe

V5E_8 = parse_slice("v5e-8")
RECIPE = Recipe(batch_size=32)


class TestWhatIsConsidered:
    @pytest.mark.parametrize("devices", [1, 2, 6, 8, 24])
    def test_every_mesh_once(self, devices):
        sizes = range(1, devices + 1)
        every = [m for m in itertools.product(sizes, sizes, sizes) if m[0] * m[1] * m[2] == devices]
        assert sorted(meshes(devices)) == sorted(every)

    @pytest.mark.parametrize(("batch_size", "devices"), [(32, 8), (4, 8), (6, 4)])
    def test_no_device_is_without_rows(self, batch_size, devices):
        found = list(variants(Recipe(batch_size=batch_size), devices))
        for changes in found:
            assert changes["mesh.data"] * changes["mesh.fsdp"] <= batch_size // changes["accumulate"]
            assert batch_size % changes["accumulate"] == 0
        assert len({tuple(sorted(changes.items(), key=str)) for changes in found}) == len(found)

    def test_tensor_parallelism_remains_where_rows_are_few(self):
        assert {changes["mesh.tp"] for changes in variants(Recipe(batch_size=1), 4)} == {4}

    def test_every_setting_keeps_the_batch(self):
        recipe = Recipe(batch_size=8, steps=7)
        for changes in variants(recipe, 4):
            assert {"batch_size", "steps"} <= recipe.model_dump().keys() - changes.keys()
            assert changed(recipe, changes).batch_size == 8

    @pytest.mark.parametrize(("pack", "tried"), [(True, {True}), (False, {True, False})])
    def test_packing_is_not_taken_away(self, pack, tried):
        assert {changes["pack"] for changes in variants(Recipe(pack=pack), 2)} == tried


class TestChanges:
    def test_a_nested_key_leaves_its_neighbours(self):
        recipe = changed(Recipe(mesh=Mesh(data=2, tp=4)), {"mesh.fsdp": 2, "remat": "block", "chunk": None})
        assert recipe.mesh == Mesh(data=2, fsdp=2, tp=4)
        assert (recipe.remat, recipe.chunk) == ("block", None)

    def test_no_change_is_the_recipe(self):
        assert changed(RECIPE, {}) == RECIPE

    @pytest.mark.parametrize("changes", [{"accumulate": 3}, {"remat": "all"}, {"mesh.pp": 2}, {"nothing": 1}])
    def test_what_a_recipe_file_could_not_say_is_refused(self, changes):
        with pytest.raises(ValidationError):
            changed(RECIPE, changes)


class TestCandidates:
    def test_json_and_back(self):
        candidate = canned_candidate({"mesh.tp": 8, "chunk": None})
        assert Candidate.from_json(candidate.to_json()) == candidate

    def test_memory_counts_against_what_one_device_has(self):
        usable = V5E_8.chip.usable_hbm_bytes
        small, large = (canned_candidate({}, memory=usable * share) for share in (1.2, 1.3))
        assert within([small, large], V5E_8) == [small]
        assert within([small, large], V5E_8, margin=0.9) == []
        # A chip of TPU7x is two devices.
        half = canned_candidate({}, memory=parse_slice("tpu7x-8").chip.usable_hbm_bytes * 0.6)
        assert within([half], parse_slice("tpu7x-8"), margin=1.0) == []

    def test_the_bound_is_the_slowest_resource(self):
        def seconds(flops, traffic, sent):
            return lower_bound(Analytic({"linear": flops}, {}, traffic, sent), V5E_8)

        assert seconds(197e12, 0, 0) == pytest.approx(1)
        assert seconds(0, 819e9, 0) == pytest.approx(1)
        assert seconds(0, 0, 150e9) == pytest.approx(1)  # three of the four links
        assert seconds(197e12, 2 * 819e9, 150e9) == pytest.approx(2)

    def test_only_the_first_of_those_that_differ_in_chunk_or_packing_is_kept(self):
        first, second, other = (
            canned_candidate({"remat": remat, "chunk": chunk, "pack": True})
            for remat, chunk in [("none", 128), ("none", None), ("block", None)]
        )
        assert without_repeats([first, second, other]) == [first, other]


def planned(hours=None, usd=None):
    """A plan with these figures; without hours, one that does not fit."""
    guess = None if hours is None else Estimate(Roofline(1.0, 1.0, 1.0), 1.0, 1.0, 1.0, hours, usd, usd)
    return Planned(V5E_8, RECIPE, Result(), estimate=guess)


def test_what_is_worth_most_comes_first():
    slow, fast, unpriced, too_large = planned(9, 1.0), planned(1, 9.0), planned(2), planned()
    every = [too_large, unpriced, slow, fast]
    assert sorted(every, key=lambda p: worth(p, "cost")) == [slow, fast, unpriced, too_large]
    assert sorted(every, key=lambda p: worth(p, "time")) == [fast, unpriced, slow, too_large]


def remat_decides(changes):
    """A model in which recomputing costs time and saves memory, and only tp 1 on full rows is possible."""
    if changes["mesh.tp"] > 1 or changes["accumulate"] > 1:
        return None
    seconds = {"none": 1.0, "dots": 1.1, "block": 1.5}[changes["remat"]]
    return canned_candidate(changes, seconds + 0.001 * changes["mesh.fsdp"])


class TestSearch:
    def search(self, compiler, **wishes):
        return search_slice(Wishes(RECIPE, **wishes), V5E_8, None, lambda done: None)

    def test_the_fastest_are_compiled_first_until_no_other_can_win(self, monkeypatch):
        # A step takes ten seconds by the compiled counts, more than any candidate promises.
        compiler = CannedCompiler(lambda recipe: canned_program(flops=197e13), remat_decides).install(monkeypatch)
        tried = self.search(compiler, tries=3)
        assert [(p.changes["remat"], p.changes["mesh.fsdp"]) for p in tried] == [("none", 1), ("none", 2), ("none", 4)]
        assert [p.recipe.mesh.fsdp for p in tried] == [1, 2, 4]
        assert all(p.estimate for p in tried)

    def test_it_stops_once_what_is_left_promises_less_than_was_found(self, monkeypatch):
        # 1.0 seconds by the compiled counts; from remat "block" on the model promises 1.5.
        compiler = CannedCompiler(lambda recipe: canned_program(flops=197e12), remat_decides).install(monkeypatch)
        assert {p.recipe.remat for p in self.search(compiler, tries=99)} == {"none", "dots"}

    def test_it_goes_on_while_nothing_fits(self, monkeypatch):
        def program(recipe):
            return canned_program() if recipe["remat"] == "block" else canned_program(**TOO_LARGE)

        compiler = CannedCompiler(program, remat_decides).install(monkeypatch)
        tried = self.search(compiler, tries=99)
        assert [p.fits for p in tried] == [False] * 8 + [True] * (len(tried) - 8)
        assert tried[8].recipe.remat == "block"

    def test_where_nothing_could_fit_the_recipe_is_compiled_as_it_is(self, monkeypatch):
        compiler = CannedCompiler(
            lambda recipe: canned_program(**TOO_LARGE), lambda changes: canned_candidate(changes, memory=99 * GIB)
        ).install(monkeypatch)
        (only,) = self.search(compiler)
        assert (only.recipe, only.changes, only.fits) == (RECIPE, {}, False)


class TestAdvice:
    def test_few_changes_come_before_fast_ones(self, monkeypatch):
        def candidate(changes):
            smaller = changes["remat"] == "block" or changes["accumulate"] > 1
            return canned_candidate(changes, 1.0 / changes["accumulate"], GIB if smaller else 99 * GIB)

        CannedCompiler(lambda recipe: canned_program(**TOO_LARGE), candidate).install(monkeypatch)
        plan = Planned(V5E_8, RECIPE, canned_result(canned_program(**TOO_LARGE)))
        # The mesh is the one that was compiled, and not a change.
        assert [change for change, _ in advised(Wishes(RECIPE), plan).advice] == [
            "--accumulate 4",  # 8 and more leave devices of this mesh without rows
            "--accumulate 2",
            "--remat block",
        ]

    def test_what_fits_needs_none(self, monkeypatch):
        compiler = CannedCompiler(None).install(monkeypatch)
        plan = Planned(V5E_8, RECIPE, canned_result(canned_program()))
        assert advised(Wishes(RECIPE), plan) is plan
        assert not compiler.ranked


class TestSeveralSlices:
    PARTS = (parse_slice("v5e-4"), V5E_8)

    def plan(self, monkeypatch, refused):
        def compiler(job):
            return Result(error="refused") if job.slice in refused else canned_result(canned_program())

        monkeypatch.setattr("portlab_jax.planner.plan.compile_job", compiler)
        return plan_all(Wishes(RECIPE), self.PARTS, {part.name: None for part in self.PARTS}, search=False)

    def test_one_that_is_refused_is_kept_beside_the_others(self, monkeypatch):
        assert [p.fits for p in self.plan(monkeypatch, {"v5e-4"})] == [False, True]

    def test_a_recipe_that_no_slice_can_run_is_bad_input(self, monkeypatch):
        with pytest.raises(UserError, match="refused"):
            self.plan(monkeypatch, {"v5e-4", "v5e-8"})
