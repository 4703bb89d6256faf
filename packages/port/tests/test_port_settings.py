"""Single settings: what becomes of them, and what is refused."""

import pytest

from portlab_port.build import Answers
from portlab_port.port import port
from portlab_port.read import read
from portlab_spec.errors import UserError

BASE = """\
model_name_or_path: google/gemma-3-1b-it
dataset_name: rows.jsonl
use_peft: true
max_steps: 100
"""


def ported(more="", base=BASE, name="sft.yaml", devices=1, **answers):
    if "accept" in answers:
        answers["accept"] = frozenset(answers["accept"])
    return port(read(base + more, name), devices, Answers(**answers))


def recipe(more="", **options):
    return ported(more, **options).recipe


def fate(name, result):
    return next(note.fate for note in result.notes if note.setting.name == name)


def refused(more="", **options):
    with pytest.raises(UserError) as caught:
        ported(more, **options)
    return str(caught.value)


# ------------------------------------------------------------------------------------------------ precision


def test_fp16_becomes_bfloat16():
    result = ported("fp16: true\nbf16: false\n")
    assert result.recipe.dtype == "auto"
    assert fate("fp16", result) == "changes"
    assert "loss scaler" in next(note.why for note in result.notes if note.setting.name == "fp16")


def test_both_precisions_contradict_each_other():
    assert "bf16 and fp16 are both true" in refused("fp16: true\nbf16: true\n")


@pytest.mark.parametrize(
    ("more", "dtype"),
    [
        ("bf16: false\ndtype: float32\n", "float32"),
        ("bf16: true\ndtype: float32\n", "auto"),
        ("dtype: float32\n", "auto"),  # TRL's default is bf16
        ("torch_dtype: bfloat16\n", "auto"),
        ("torch_dtype: float16\n", "auto"),
    ],
)
def test_the_base_is_float32_only_where_all_of_it_is(more, dtype):
    assert recipe(more).dtype == dtype


# ------------------------------------------------------------------------------------------------ quantisation


@pytest.mark.parametrize(
    ("more", "kind"),
    [
        ("load_in_4bit: true\n", "nf4"),
        ("load_in_8bit: true\n", "int8"),
        ("load_in_4bit: true\nbnb_4bit_quant_type: fp4\n", "nf4"),
        ("load_in_4bit: false\n", "none"),
        ("", "none"),
    ],
)
def test_quantisation(more, kind):
    assert recipe(more).lora.quantize == kind


def test_four_and_eight_bits_contradict_each_other():
    assert "both true" in refused("load_in_4bit: true\nload_in_8bit: true\n")


def test_quantised_weights_are_not_trained_whole():
    text = refused(base=BASE.replace("use_peft: true", "load_in_4bit: true"))
    assert "cannot be trained without adapters" in text


def test_a_copy_in_4_bits_is_its_original_in_ours():
    base = BASE.replace("google/gemma-3-1b-it", "unsloth/gemma-3-1b-it-unsloth-bnb-4bit")
    result = recipe(base=base)
    assert (result.model, result.lora.quantize) == ("google/gemma-3-1b-it", "nf4")


# ------------------------------------------------------------------------------------------------ models


@pytest.mark.parametrize(
    ("model", "wire", "became"),
    [
        ("google/gemma-3-270m-it", "gemma3-json", "google/gemma-3-270m-it"),
        ("google/gemma-3-27b-pt", "gemma3-json", "google/gemma-3-27b-pt"),
        ("google/functiongemma-270m-it", "functiongemma", "google/functiongemma-270m-it"),
        ("google/gemma-4-E2B-it", "gemma4", "google/gemma-4-E2B-it"),
        ("unsloth/gemma-4-e4b-it", "gemma4", "google/gemma-4-E4B-it"),
        ("google/gemma-4-31B-it", "gemma4-31b", "google/gemma-4-31B-it"),
        ("google/gemma-4-26B-A4B-it", "gemma4-31b", "google/gemma-4-26B-A4B-it"),
        ("example/gemma-3-4b-it-cooking", "gemma3-json", "example/gemma-3-4b-it-cooking"),
        ("./models/gemma-3-1b-it", "gemma3-json", "./models/gemma-3-1b-it"),
    ],
)
def test_the_family_decides_the_format(model, wire, became):
    result = recipe(base=BASE.replace("google/gemma-3-1b-it", model))
    assert (result.model, result.format) == (became, wire)


@pytest.mark.parametrize(
    "model",
    ["google/gemma-2-9b-it", "google/gemma-7b", "google/gemma-3n-E4B-it", "meta-llama/Llama-3.2-1B", "Qwen/Qwen3-4B"],
)
def test_other_families_are_refused(model):
    text = refused(base=BASE.replace("google/gemma-3-1b-it", model))
    assert model in text
    assert "--accept model_name_or_path" in text


def test_a_family_that_is_accepted_needs_a_format():
    base = BASE.replace("google/gemma-3-1b-it", "Qwen/Qwen3-4B")
    assert "--format" in refused(base=base, accept=["model_name_or_path"])
    result = recipe(base=base, accept=["model_name_or_path"], format="qwen3")
    assert (result.model, result.format) == ("Qwen/Qwen3-4B", "qwen3")


def test_weights_that_are_not_read_are_refused():
    assert "of that kind are not read" in refused(base=BASE.replace("1b-it", "1b-it-GGUF"))


# ------------------------------------------------------------------------------------------------ adapters


def test_adapter_keys_without_the_switch_are_an_error():
    """TRL would train all weights, and never mention the rank."""
    assert "without use_peft: true all weights are trained" in refused(
        "lora_r: 8\n", base=BASE.replace("use_peft: true\n", "")
    )


def test_without_adapters_all_weights_are_trained():
    assert recipe(base=BASE.replace("use_peft: true\n", "")).method == "full"


def test_what_trl_takes_where_nothing_is_said():
    lora = recipe().lora
    assert (lora.rank, lora.alpha, lora.dropout, lora.targets) == (16, 32, 0.05, ("q_proj", "v_proj"))
    assert not lora.train_control_rows  # PEFT trains no rows


@pytest.mark.parametrize(
    ("targets", "expected"),
    [
        ("[q_proj, v_proj]", ("q_proj", "v_proj")),
        ("q_proj,v_proj", ("q_proj", "v_proj")),
        ("q_proj", ("q_proj",)),
        ("[self_attn.q_proj]", ("self_attn.q_proj",)),
        (r"'.*layers\.[0-3]\..*q_proj'", (r".*layers\.[0-3]\..*q_proj",)),
        ("all-linear", ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")),
    ],
)
def test_targets(targets, expected):
    assert recipe(f"lora_target_modules: {targets}\n").lora.targets == expected


def test_all_linear_layers_of_a_model_with_more_of_them():
    targets = recipe(
        "lora_target_modules: all-linear\n", base=BASE.replace("gemma-3-1b-it", "gemma-4-E2B-it")
    ).lora.targets
    assert {"per_layer_input_gate", "per_layer_projection"} < set(targets)


def test_a_target_that_matches_nothing_is_an_error_now():
    assert "'c_attn' matches no linear layer" in refused("lora_target_modules: [c_attn]\n")


def test_layers_by_number_become_expressions():
    base = """\
from trl import SFTTrainer, SFTConfig
from peft import LoraConfig
SFTTrainer(model="google/gemma-3-270m-it", args=SFTConfig(max_steps=9),
           peft_config=LoraConfig(layers_to_transform=[0, 1], target_modules=["q_proj"]))
"""
    result = recipe(base=base, name="a.py", data="rows.jsonl")
    assert result.lora.targets == (r".*layers\.(0|1)\..*q_proj",)


def test_embedding_and_head_beside_adapters():
    text = refused("lora_modules_to_save: [lm_head, embed_tokens]\n")
    assert "lm_head, embed_tokens cannot be trained whole" in text
    assert recipe("lora_modules_to_save: [lm_head]\n", accept=["lora_modules_to_save"]).lora.train_control_rows


@pytest.mark.parametrize(
    ("more", "key"),
    [
        ("use_dora: true\n", "use_dora"),
        ("neftune_noise_alpha: 5\n", "neftune_noise_alpha"),
        ("label_smoothing_factor: 0.1\n", "label_smoothing_factor"),
        ("loss_type: dft\n", "loss_type"),
        ("beta: 0.1\n", "beta"),
        ("lora_task_type: SEQ_CLS\n", "lora_task_type"),
        ("optim: lion_32bit\n", "optim"),
        ("lr_scheduler_type: polynomial\n", "lr_scheduler_type"),
        ("completion_only_loss: false\n", "completion_only_loss"),
        ("chat_template_path: mine.jinja\n", "chat_template_path"),
        ("max_length: null\n", "max_length"),
        ("auto_find_batch_size: true\n", "auto_find_batch_size"),
    ],
)
def test_what_changes_the_loss_and_cannot_be_said_is_an_error_unless_accepted(more, key):
    text = refused(more)
    assert key in text
    assert f"--accept {key}" in text
    result = ported(more, accept=[key])
    assert [note.fate for note in result.notes if note.setting.key == key] == ["cannot"]


@pytest.mark.parametrize(
    "more",
    [
        "use_dora: false\n",
        "neftune_noise_alpha: null\n",
        "neftune_noise_alpha: 0\n",
        "label_smoothing_factor: 0.0\n",
        "loss_type: nll\n",
        "lora_task_type: CAUSAL_LM\n",
        "auto_find_batch_size: false\n",
    ],
)
def test_what_is_off_is_no_error(more):
    assert recipe(more) == recipe()


# ------------------------------------------------------------------------------------------------ optimiser


@pytest.mark.parametrize(
    "name", ["adamw_torch", "adamw_torch_fused", "adamw_8bit", "paged_adamw_32bit", "adamw_bnb_8bit"]
)
def test_adamw_of_any_kind(name):
    result = recipe(f"optim: {name}\n").optimizer
    assert (result.name, result.b1, result.b2, result.eps) == ("adamw", 0.9, 0.999, 1e-8)


def test_adafactor():
    result = ported("optim: adafactor\nadam_beta2: 0.95\n")
    assert result.recipe.optimizer.name == "adafactor"
    assert fate("adam_beta2", result) == "drops"


@pytest.mark.parametrize(
    ("more", "schedule", "final"),
    [
        ("lr_scheduler_type: linear\n", "linear", 0),
        ("lr_scheduler_type: cosine\n", "cosine", 0),
        ("lr_scheduler_type: constant_with_warmup\n", "constant", 0.05),
        ("lr_scheduler_type: inverse_sqrt\n", "inverse_sqrt", 0.05),
        ("lr_scheduler_type: cosine_with_min_lr\nlr_scheduler_kwargs: {min_lr_rate: 0.1}\n", "cosine", 0.1),
        (
            "lr_scheduler_type: cosine_with_min_lr\nlearning_rate: 1e-4\nlr_scheduler_kwargs: {min_lr: 2e-5}\n",
            "cosine",
            0.2,
        ),
    ],
)
def test_schedules_end_where_theirs_do(more, schedule, final):
    result = recipe(more).optimizer
    assert result.schedule == schedule
    assert result.final_fraction == pytest.approx(final)


def test_warmup_stable_decay():
    more = "lr_scheduler_type: warmup_stable_decay\nlr_scheduler_kwargs: {num_decay_steps: 25}\nwarmup_steps: 5\n"
    result = recipe(more).optimizer
    assert (result.schedule, result.decay_fraction, result.warmup_steps) == ("wsd", 0.25, 5)


@pytest.mark.parametrize(
    ("more", "steps"),
    [
        ("warmup_steps: 7\n", 7),
        ("warmup_ratio: 0.03\n", 3),
        ("warmup_ratio: 0.031\n", 4),  # rounded up, as in transformers
        ("warmup_steps: 0.1\n", 10),  # a share, since transformers 5
        ("warmup_steps: 7\nwarmup_ratio: 0.5\n", 7),
        ("warmup_steps: 0\nwarmup_ratio: 0.5\n", 50),
        ("lr_scheduler_type: constant\nwarmup_ratio: 0.5\n", 0),
        ("", 0),
    ],
)
def test_warm_up(more, steps):
    assert recipe(more).optimizer.warmup_steps == steps


def test_a_warm_up_longer_than_the_run_is_an_error():
    assert "not shorter than the run" in refused("warmup_steps: 100\n")


def test_no_clip():
    assert recipe("max_grad_norm: 0\n").optimizer.clip_norm == 1e9


# ------------------------------------------------------------------------------------------------ batch and steps


def test_max_steps_override_epochs():
    result = ported("num_train_epochs: 3\n")
    assert result.recipe.steps == 100
    assert fate("num_train_epochs", result) == "drops"


def test_epochs_need_rows():
    base = BASE.replace("max_steps: 100", "max_steps: -1")
    assert "--rows N" in refused(base=base)
    assert recipe(base=base, rows=64).steps == 3 * 8  # TRL's three epochs, of 8 batches of 8


def test_a_packed_batch_needs_to_know_what_a_row_holds():
    more = "packing: true\nper_device_train_batch_size: 4\n"
    assert "--examples-per-row" in refused(more)
    assert recipe(more, examples_per_row=2.5).batch_size == 10
    assert recipe(more, accept=["packing"]).batch_size == 4


def test_per_device_is_global_under_xla():
    """One process drives all devices there: what TRL calls per device are the rows of the mesh."""
    more = "per_device_train_batch_size: 4\nfsdp: full_shard\nfsdp_config: {{xla: true, xla_fsdp_v2: {}}}\n"
    assert recipe(more.format("true"), devices=8).batch_size == 4
    assert recipe(more.format("false"), devices=8).batch_size == 32


def test_devices_that_share_rows_count_once():
    base = "base_model: google/gemma-3-1b-it\nlearning_rate: 1e-4\nmax_steps: 9\ndatasets: [{path: rows.jsonl}]\n"
    more = "micro_batch_size: 3\ntensor_parallel_size: 2\ncontext_parallel_size: 2\n"
    assert recipe(more, base=base, devices=8).batch_size == 3 * 2
    assert "no multiple of the 4 that share rows" in refused(more, base=base, devices=6)


def test_what_full_batches_make_of_epochs_is_said():
    base = BASE.replace("max_steps: 100", "num_train_epochs: 3")
    assert "seen 4.8 times" in " ".join(ported(base=base, rows=10).sums)  # 2 steps of 8, thrice, are 48 rows of 10
    assert "seen" not in " ".join(ported(base=base, rows=80).sums)


def test_rows_that_are_not_packed_there_are_packed_here():
    assert recipe("packing: false\n").pack


# ------------------------------------------------------------------------------------------------ data and mask


def test_several_data_sets_are_refused():
    base = "base_model: google/gemma-3-1b-it\nlearning_rate: 1e-4\nmax_steps: 9\ndatasets:\n"
    more = "- {path: a/one, type: chat_template}\n- {path: b/two, type: chat_template}\n"
    assert "one data set for a run" in refused(more, base=base)
    assert recipe(more, base=base, data="both.jsonl").data == "both.jsonl"


def test_no_data_set_asks_for_one():
    base = BASE.replace("dataset_name: rows.jsonl\n", "")
    assert "--data" in refused(base=base)


def test_training_on_prompts_is_refused():
    base = "base_model: google/gemma-3-1b-it\nlearning_rate: 1e-4\nmax_steps: 9\ndatasets: [{path: rows.jsonl}]\n"
    assert "prompts cannot be learnt" in refused("train_on_inputs: true\n", base=base)
    assert recipe("train_on_inputs: false\n", base=base).too_long == "drop"  # as Axolotl does


# ------------------------------------------------------------------------------------------------ watching


def test_patience_without_a_measurement_is_refused():
    base = BASE + "load_best_model_at_end: true\n"
    assert "needs a monitored loss" in refused(base=base)


def test_an_evaluation_that_would_never_come():
    assert recipe("eval_strategy: steps\neval_steps: 500\n").eval_every == 0


@pytest.mark.parametrize(
    ("more", "every"), [("save_steps: 0.25\n", 25), ("save_strategy: 'no'\n", 100), ("save_steps: 7\n", 7)]
)
def test_checkpoints(more, every):
    assert recipe(more).save_every == every


def test_arguments_of_the_model_are_settings():
    result = ported("model_init_kwargs: {attn_implementation: eager, rope_scaling: null, frob: 1}\n")
    assert [u.key for u in result.unknown] == ["model_init_kwargs.frob"]
    assert "rope_scaling" in refused("model_init_kwargs: {rope_scaling: {factor: 2}}\n")


def test_secrets_are_not_shown():
    result = ported("hub_token: hf_abcdef\nfsdp_config: {api_key: 12345abc}\nwandb_token: x1y2\n")
    shown = " ".join(note.setting.text for note in result.notes)
    assert "hf_abcdef" not in shown
    assert "12345abc" not in shown
    assert shown.count("(hidden)") == 3
