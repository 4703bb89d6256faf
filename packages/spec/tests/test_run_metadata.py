"""What a checkpoint says of its run, and which runs may not go on from it."""

import pytest

from portlab_spec.assets import ModelFolder
from portlab_spec.errors import UserError
from portlab_spec.files import sha256_file, sha256_json
from portlab_spec.recipe import Lora, Optimizer, Recipe
from portlab_spec.run.metadata import require_same_run, run_metadata

LEAVES = (("sliding.self_attn.q_proj", ("model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.q_proj")),)
ROWS = ("model.embed_tokens.weight", (46,))


@pytest.fixture
def base(tmp_path):
    folder = tmp_path / "base"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"weights")
    return ModelFolder(folder, "a/base", None)


def describe(base, recipe=None, leaves=LEAVES, rows=ROWS, **options):
    return run_metadata(recipe or Recipe(), base, "gemma3", leaves, versions={"jax": "1.0"}, token_rows=rows, **options)


def test_it_names_the_base_by_its_bytes_and_protects_the_adapter(base):
    metadata = describe(base)
    assert metadata["format"] == "portlab-lora/1"
    assert metadata["base"]["files_sha256"] == {"model.safetensors": sha256_file(base.path / "model.safetensors")}
    assert metadata["lora"]["targets"] == ["q_proj"]
    assert metadata["lora"]["token_rows"] == {"parameter": ROWS[0], "ids": [46]}
    assert metadata["lora_sha256"] == sha256_json(metadata["lora"])
    assert metadata["versions"] == {"jax": "1.0"}


def test_the_same_run_goes_on(base):
    require_same_run(describe(base), describe(base), "here", "train-jax")


OTHERS = {
    "its adapter differs (lora.rank 16, now 8)": lambda base: describe(base, Recipe(lora=Lora(rank=8))),
    "its adapter differs (lora.alpha 32.0, now 16.0)": lambda base: describe(base, Recipe(lora=Lora(alpha=16))),
    "(it has q_proj, this run has v_proj)": lambda base: describe(
        base, leaves=[("sliding.v_proj", ["layers.0.v_proj"])]
    ),
    "other layers of the same modules": lambda base: describe(base, leaves=[(LEAVES[0][0], LEAVES[0][1][:1])]),
    "other token rows": lambda base: describe(base, rows=None),
    "its method is lora, now full": lambda base: describe(base, Recipe(method="full")),
    "its optimiser is adamw, now adafactor": lambda base: describe(base, Recipe(optimizer=Optimizer(name="adafactor"))),
}


@pytest.mark.parametrize("says", OTHERS)
def test_another_run_is_refused(base, says):
    with pytest.raises(UserError) as refused:
        require_same_run(describe(base), OTHERS[says](base), "here", "train-jax")
    assert says in str(refused.value)
    assert "Choose another --out" in str(refused.value)


def test_a_changed_base_is_refused_by_its_files(base):
    saved = describe(base)
    (base.path / "model.safetensors").write_bytes(b"weights of another")
    with pytest.raises(UserError, match=r"its base differs \(model.safetensors\)"):
        require_same_run(saved, describe(base), "here", "train-jax")


def test_changed_data_are_refused(base):
    saved, now = (describe(base, data_digest=digest) for digest in ("aa", "bb"))
    with pytest.raises(UserError, match="its training rows or their order differ"):
        require_same_run(saved, now, "here", "train-jax")


@pytest.mark.parametrize("trainer", ["train-jax", "train-xla"])
def test_a_foreign_checkpoint_is_refused(base, trainer):
    with pytest.raises(UserError, match=f"format is None, which {trainer} does not know") as refused:
        require_same_run({}, describe(base), "here", trainer)
    assert f"{trainer} goes on from its own checkpoints only" in str(refused.value)
