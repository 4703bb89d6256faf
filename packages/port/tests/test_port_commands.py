"""Command lines and YAML: what is read, and what is refused."""

import pytest

from portlab_port.build import Answers
from portlab_port.port import port
from portlab_port.read import read
from portlab_spec.errors import UserError

TRAIN = "sft.py --model_name_or_path google/gemma-3-1b-it --dataset_name rows.jsonl --max_steps 9"


def recipe(text, devices=None, name="run.sh"):
    return port(read(text, name), devices, Answers()).recipe


@pytest.mark.parametrize(
    ("launcher", "devices"),
    [
        ("python", 1),
        ("accelerate launch --num_processes 8", 8),
        ("accelerate launch --num_processes=4 --multi_gpu", 4),
        ("torchrun --nproc_per_node 4 --nnodes 2", 8),
        ("torchrun --nproc-per-node=2 --standalone", 2),
        ("deepspeed --num_gpus 4", 4),
        ("CUDA_VISIBLE_DEVICES=0,1 accelerate launch --num_processes 2", 2),
        ("accelerate launch --config_file zero3.yaml --num_processes 8 --mixed_precision bf16", 8),
    ],
)
def test_devices_count_in_the_batch(launcher, devices):
    result = recipe(f"{launcher} {TRAIN} --per_device_train_batch_size 2 --gradient_accumulation_steps 3")
    assert (result.batch_size, result.accumulate) == (2 * devices * 3, 3)


def test_devices_by_hand_come_first():
    assert recipe(f"accelerate launch --num_processes 8 {TRAIN}", devices=2).batch_size == 16


@pytest.mark.parametrize(
    "command",
    [
        f"python {TRAIN} --use_peft --lora_target_modules q_proj v_proj --learning_rate 3e-4",
        f"python {TRAIN} \\\n  --use_peft --lora-target-modules q_proj v_proj \\\n  --learning-rate=3e-4 > log 2>&1",
        f'RATE=3e-4\nQ="q_proj"\npython {TRAIN} --use_peft --lora_target_modules $Q v_proj --learning_rate ${{RATE}}',
        f"# a comment\nset -e\ncd work\npython {TRAIN} --use_peft --lora_target_modules q_proj v_proj "
        "--learning_rate ${RATE:-3e-4}",
    ],
)
def test_one_command_in_several_hands(command):
    result = recipe(command)
    assert (result.lora.targets, result.optimizer.learning_rate) == (("q_proj", "v_proj"), 3e-4)


def test_llama_factory_by_command():
    result = recipe(
        "llamafactory-cli train --stage sft --finetuning_type lora --model_name_or_path google/gemma-3-1b-it "
        "--dataset rows.jsonl --template gemma3 --max_steps 9 --lora_rank 4"
    )
    assert (result.lora.rank, result.lora.alpha, len(result.lora.targets)) == (4, 8, 7)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("echo hello", "no training command"),
        ("", "no training command"),
        (f"python {TRAIN}\npython {TRAIN}", "2 training commands"),
        (f"python {TRAIN} --learning_rate $RATE", r"\$RATE is set nowhere"),
        (f"python {TRAIN} --run_name 'open", "no shell command"),
        ("axolotl train gemma.yml --num-epochs 1", r"its settings are in gemma\.yml"),
        ("trl sft --config sft.yaml", r"its settings are in sft\.yaml"),
        (f"python {TRAIN} --learning_rate fast", "must be a number"),
    ],
)
def test_commands_that_are_refused(text, message):
    with pytest.raises(UserError, match=message):
        recipe(text)


def test_an_option_that_is_not_known_is_kept_as_unknown():
    assert [u.key for u in read(f"python {TRAIN} --frob 3", "run.sh").unknown] == ["frob"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [", "is not YAML"),
        ("- a\n- b", "is no recipe"),
        ("", "is no recipe"),
        ("distributed_type: FSDP\nnum_processes: 8\nmixed_precision: bf16", "configuration of accelerate"),
        ("frob: 1\nother: 2", "no fine-tuning recipe that is known"),
        ("learning_rate: 1\nlearning_rate: 2", "stands twice"),
        ("dataset_name: a\nlearning_rate: [1]", "must be a number"),
        ("dataset_name: a\nmax_steps: 1.5", "must be a whole number"),
        ("dataset_name: a\nbf16: perhaps", "must be true or false"),
        ("dataset_name: a\nlearning_rate: .inf", "must be a number"),
        ("max_length: 8\nmax_seq_length: 16\ndataset_name: a", "contradict each other"),
        ("&a [*a]", "is"),
        ("!!python/object/apply:os.system ['true']", "is not YAML"),
    ],
)
def test_yaml_that_is_refused(text, message):
    with pytest.raises(UserError, match=message):
        read(text, "sft.yaml")


def test_a_setting_is_named_with_its_line():
    text = "# a comment\nmodel: {name: google/gemma-3-1b-it}\ntraining:\n  max_steps: 9\n  learning_rate: fast\n"
    with pytest.raises(UserError, match=r"a\.yaml:5: training\.learning_rate must be a number"):
        read(text, "a.yaml", "unsloth")


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("dataset_mixer: {a/b: 0.5}", "one data set for a run"),
        ("dataset_mixture: {datasets: [{id: a/b, weight: 0.1}]}", "one data set for a run"),
        ("dataset_mixture: {datasets: [{id: [a], 3: 4}, 7]}", None),
    ],
)
def test_parts_of_data_sets(more, message):
    text = f"model_name_or_path: google/gemma-3-1b-it\nmax_steps: 9\n{more}\n"
    if message is None:
        assert len(read(text, "a.yaml").unknown) == 1
        return
    with pytest.raises(UserError, match=message):
        recipe(text, name="a.yaml")


@pytest.mark.parametrize(("roles", "trains"), [("[assistant]", True), ("[gpt]", True), ("[user, assistant]", False)])
def test_roles_of_axolotl(roles, trains):
    text = (
        "base_model: google/gemma-3-1b-it\nlearning_rate: 1e-4\nmax_steps: 9\n"
        f"datasets: [{{path: rows.jsonl, type: chat_template, roles_to_train: {roles}, 3: 4}}]\n"
    )
    if trains:
        assert recipe(text, name="a.yml").steps == 9
    else:
        with pytest.raises(UserError, match="prompts cannot be learnt"):
            recipe(text, name="a.yml")


def test_a_blank_says_nothing():
    base = "dataset_name: rows.jsonl\nmodel_name_or_path: google/gemma-3-1b-it\nmax_steps: 9\n"
    assert recipe(base + "seed:\nlora_r:\nhub_model_id:\n", name="a.yaml") == recipe(base, name="a.yaml")


@pytest.mark.parametrize(
    "value",
    [
        "&a [*a]",
        "[&a [x, x, x, x, x, x], &b [*a, *a, *a, *a, *a], &c [*b, *b, *b, *b, *b], [*c, *c, *c, *c, *c]]",
        "[" * 60 + "]" * 60,
        "{" + ", ".join(f"k{i}: {i}" for i in range(5000)) + "}",
    ],
)
def test_values_without_end_are_shown_in_a_line(value):
    base = "dataset_name: rows.jsonl\nmodel_name_or_path: google/gemma-3-1b-it\nmax_steps: 9\n"
    for key in ("frob", "fsdp_config"):
        gpu = read(f"{base}{key}: {{x: {value}}}\n", "a.yaml")
        assert all(len(item.text) <= 80 for item in (*gpu.unknown, *gpu.settings))
    with pytest.raises(UserError, match="must be a name or a list of names"):
        read(f"{base}report_to: [[{value}]]\n", "a.yaml")


@pytest.mark.parametrize(
    ("plugins", "fate"),
    [
        ("[axolotl.integrations.liger.LigerPlugin]", "fused_kernels"),
        ("[axolotl.integrations.kd.KDPlugin]", "other_loss"),
    ],
)
def test_plugins_of_axolotl(plugins, fate):
    gpu = read(f"base_model: google/gemma-3-1b-it\nplugins: {plugins}\n", "a.yml")
    assert [s.name for s in gpu.settings if s.key == "plugins"] == [fate]


def test_defaults_follow_what_is_set_by_hand():
    text = "dataset_name: rows.jsonl\nmodel_name_or_path: google/gemma-3-1b-it\nmax_steps: 9\n"
    gpu = read(text, "a.yaml", None, {"use_peft": True, "warmup_ratio": 0.5})
    result = port(gpu, 1).recipe
    assert (result.method, result.lora.rank, result.optimizer.warmup_steps) == ("lora", 16, 5)


def test_a_style_that_is_given_is_taken():
    text = "learning_rate: 1e-4\nmax_steps: 9\noutput_dir: out\nseed: 1\n"
    assert read(text, "a.yaml", "axolotl").style == "axolotl"
    assert read(text, "a.yaml", "trl").style == "trl"
