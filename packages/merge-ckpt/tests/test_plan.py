"""Whatever does not fit is refused before anything is written, with every reason at once."""

import json
import shutil

import numpy as np
import pytest

from portlab_merge.base_model import open_base
from portlab_merge.checkpoint import read_checkpoint
from portlab_merge.overlay import MergeOptions, merge
from portlab_merge.peft_adapter import export_adapter
from portlab_merge.plan import PlanRefused, make_plan
from portlab_merge.sources import Given
from portlab_spec.errors import UserError
from portlab_spec.files import sha256_json


def test_every_leaf_is_matched_once(run):
    plan = run.plan()
    assert len(plan.targets) == 7 * 3
    assert len({t.tensor for t in plan.targets}) == 7 * 3
    assert plan.rows.tensor == "model.embed_tokens.weight"


def test_delta_norm_is_that_of_the_full_matrix(run):
    plan = run.plan()
    target = plan.targets[4]
    a, b = plan.factors(target)
    assert plan.delta_norm(target) == pytest.approx(np.linalg.norm(2.0 * (a @ b)), rel=1e-5)


def zero_b(tree, metadata):
    tree["lora"]["self_attn.q_proj"]["b"][:] = 0
    metadata["leaf_sha256"].pop("lora/self_attn.q_proj/b")


def not_finite(tree, metadata):
    tree["lora"]["self_attn.q_proj"]["a"][0, 0, 0] = np.nan


def drop_leaf(tree, metadata):
    del tree["lora"]["self_attn.q_proj"]


def extra_leaf(tree, metadata):
    tree["lora"]["self_attn.x_proj"] = tree["lora"]["self_attn.q_proj"]


def twice(tree, metadata):
    metadata["lora"]["leaves"][0]["modules"][1] = metadata["lora"]["leaves"][0]["modules"][0]


def unknown_module(tree, metadata):
    metadata["lora"]["leaves"][0]["modules"][0] = "model.layers.7.self_attn.q_proj"


def too_few_modules(tree, metadata):
    metadata["lora"]["leaves"][0]["modules"].pop()


def transposed(tree, metadata):
    leaf = tree["lora"]["mlp.up_proj"]
    leaf["a"], leaf["b"] = leaf["b"].transpose(0, 2, 1).copy(), leaf["a"].transpose(0, 2, 1).copy()


def half_precision(tree, metadata):
    tree["lora"]["mlp.up_proj"]["a"] = tree["lora"]["mlp.up_proj"]["a"].astype(np.float16)


REFUSALS = [
    (zero_b, "is all zero: the adapter is still at its initialisation"),
    (not_finite, "leaf lora/self_attn.q_proj/a holds 1 values that are not finite"),
    (drop_leaf, "leaf lora/self_attn.q_proj/a is in the metadata but not stored"),
    (extra_leaf, "leaf lora/self_attn.x_proj/a is stored but no module uses it"),
    (twice, "gets 2 updates"),
    (unknown_module, "model.layers.7.self_attn.q_proj is not in the base"),
    (too_few_modules, "for 2 modules"),
    (transposed, "the update is"),
    (half_precision, "is float16, expected float32"),
    (lambda tree, m: m["lora"].update(scaling=8.0), "scaling 8 is not alpha / rank = 2"),
    (lambda tree, m: m["lora"].update(rank=8, scaling=1.0), "has rank 4, the metadata says 8"),
    (lambda tree, m: m["lora"].update(rank_pattern={"q_proj": 2}), "has rank 4, the metadata says 2"),
    (lambda tree, m: m["lora"]["targets"].append("lm_head"), "target lm_head was trained in no module"),
    (lambda tree, m: m["lora"]["targets"].remove("q_proj"), "is none of the targets"),
    (lambda tree, m: m["lora"]["token_rows"]["ids"].__setitem__(0, 96), "do not lie in"),
    (lambda tree, m: m["lora"]["token_rows"]["ids"].__setitem__(0, 5), "lists a token id twice"),
    (lambda tree, m: m["lora"].update(token_rows=None), "leaf token_rows is stored but no module uses it"),
    (lambda tree, m: m["leaf_sha256"].update({"lora/mlp.up_proj/a": "0" * 64}), "differs from what the trainer saved"),
    (lambda tree, m: m["leaf_sha256"].pop("lora/mlp.up_proj/a"), "has no sha256"),
    (lambda tree, m: m["model"].update(config_sha256="0" * 64), "wrong base: config.json"),
    (lambda tree, m: m["base"].update(files_sha256={"other.safetensors": "0" * 64}), "wrong base: "),
]


@pytest.mark.parametrize(("edit", "reason"), REFUSALS, ids=[reason for _, reason in REFUSALS])
def test_what_does_not_fit_is_refused(make_run, base, edit, reason):
    with pytest.raises(PlanRefused) as caught:
        make_run(base, edit).plan()
    assert any(reason in problem for problem in caught.value.problems), caught.value.problems


def test_all_problems_are_listed_at_once(make_run, base):
    def spoil(tree, metadata):
        not_finite(tree, metadata)
        extra_leaf(tree, metadata)
        metadata["lora"]["scaling"] = 8.0

    with pytest.raises(PlanRefused) as caught:
        make_run(base, spoil).plan()
    assert len(caught.value.problems) == 5
    assert "(and 4 more)" in str(caught.value)


def test_alpha_pattern_scales_its_modules(make_run, base):
    plan = make_run(base, lambda tree, m: m["lora"].update(alpha_pattern={r"layers\.1\..*": 2.0})).plan()
    assert {t.scaling for t in plan.targets if ".1." in t.tensor} == {0.5}
    assert {t.scaling for t in plan.targets if ".1." not in t.tensor} == {2.0}


def test_token_rows_need_tied_embeddings(make_run, base, describe, tmp_path):
    folder = tmp_path / "untied"
    shutil.copytree(base, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    with pytest.raises(PlanRefused, match="output matrix of its own"):
        make_run(folder).plan()


@pytest.mark.parametrize("write", [merge, export_adapter], ids=["merge", "adapter"])
def test_other_weights_are_refused_and_leave_nothing(make_run, base, tmp_path, write):
    def other(tree, metadata):
        metadata["base"]["files_sha256"]["model.safetensors"] = "0" * 64

    plan = make_run(base, other).plan()
    with pytest.raises(UserError, match=r"model\.safetensors: wrong base"):
        write(plan, tmp_path / "new" / "out", *([MergeOptions()] if write is merge else []))
    assert list((tmp_path / "new").glob("**/*")) == []


def test_output_must_not_touch_an_input(run, tmp_path):
    link = tmp_path / "link"
    link.symlink_to(run.base)
    for out in (run.base, run.base / "sub", link, link / "sub", run.base.parent, run.step / "x"):
        for write in (lambda out: merge(run.plan(), out, MergeOptions()), lambda out: export_adapter(run.plan(), out)):
            with pytest.raises(UserError, match="overlaps"):
                write(out)


def test_output_must_not_exist(run, tmp_path):
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    (tmp_path / "file").write_text("")
    for name in ("dangling", "file"):
        with pytest.raises(UserError, match="already exists"):
            merge(run.plan(), tmp_path / name, MergeOptions())


@pytest.mark.parametrize("options", [{"scale": 0.0}, {"scale": float("nan")}, {"threads": 0}])
def test_senseless_options_are_refused(run, tmp_path, options):
    with pytest.raises(UserError, match="must be"):
        merge(run.plan(), tmp_path / "out", MergeOptions(**options))


def test_a_base_with_two_sets_of_weights_is_refused(base, tmp_path):
    shutil.copytree(base, tmp_path / "both")
    (tmp_path / "both" / "model.safetensors.index.json").write_text('{"weight_map": {}}')
    with pytest.raises(UserError, match="holds both"):
        open_base(tmp_path / "both")


def test_an_index_that_disagrees_is_refused(make_base):
    folder = make_base(max_shard_size="40KB")
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"].pop("model.norm.weight")
    path.write_text(json.dumps(index))
    with pytest.raises(UserError, match=r"disagree on 1 tensors, first model\.norm\.weight"):
        open_base(folder)


def quantized(tree, metadata):
    metadata["recipe"] = {"lora": {"quantize": "int8"}}


def test_an_adapter_of_a_quantised_base_is_taken_only_knowingly(make_run, base):
    run = make_run(base, quantized)
    with pytest.raises(PlanRefused, match="trained beside a base in int8, whose error it has learnt to mend"):
        run.plan()
    assert len(make_plan(open_base(base), read_checkpoint(run.folder), accept_unquantized=True).targets) == 21


def test_a_value_far_from_the_others_is_told_of(make_run, base, describe):
    def flip(tree, metadata):
        tree["lora"]["mlp.up_proj"]["a"][1, 2, 3] = 2e38
        metadata |= describe(base, tree)

    [warning] = make_run(base, flip).plan().warnings
    assert "leaf lora/mlp.up_proj[1] a holds 2e+38" in warning


def test_alpha_may_not_be_said_twice(run):
    with pytest.raises(UserError, match="the checkpoint carries its own alpha"):
        read_checkpoint(run.folder, given=Given(alpha=16.0))


def test_a_flipped_token_id_is_found(make_run, base):
    def flip(tree, metadata):
        metadata["lora_sha256"] = sha256_json(metadata["lora"])
        metadata["lora"]["token_rows"]["ids"][0] += 1

    with pytest.raises(UserError, match="adapter metadata is not what the trainer saved"):
        make_run(base, flip).plan()
