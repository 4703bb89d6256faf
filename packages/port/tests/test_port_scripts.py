"""Scripts and notebooks: parsed, never run."""

import json

import pytest

from portlab_port.build import Answers
from portlab_port.port import port
from portlab_port.read import read
from portlab_port.settings import Computed
from portlab_spec.errors import UserError

IMPORTS = "from trl import SFTConfig, SFTTrainer\nfrom peft import LoraConfig\n"


def script(arguments, before="", after="", model="'google/gemma-3-1b-it'"):
    return f"""{IMPORTS}{before}
config = SFTConfig({arguments})
trainer = SFTTrainer(model={model}, args=config, train_dataset=rows, peft_config=LoraConfig(r=8, lora_alpha=16))
{after}"""


def value(expression, before=""):
    """What `learning_rate` is read as."""
    gpu = read(script(f"max_steps=9, max_length={expression}", before), "train.py")
    return gpu.named()["max_length"].value


def recipe(text, name="train.py", **answers):
    return port(read(text, name), 1, Answers(data="rows.jsonl", **answers)).recipe


@pytest.mark.parametrize(
    ("expression", "before", "expected"),
    [
        ("1024", "", 1024),
        ("2 * 512", "", 1024),
        ("2 ** 10", "", 1024),
        ("4096 // 4", "", 1024),
        ("LENGTH", "LENGTH = 1024", 1024),
        ("LENGTH", "LENGTH: int = 1024", 1024),
        ("LENGTH", "HALF = 512\nLENGTH = HALF + HALF", 1024),
        ("LENGTH", "LENGTH = 1024\nLENGTH = 1024", 1024),
        ("int('1024')", "", 1024),
        ("limits['row']", "limits = {'row': 1024}", 1024),
        ("limits['row']", "limits = dict(row=512)\nlimits['row'] = 1024", 1024),
        ("a", "a, b = 1024, 2048", 1024),
        ("b if True else a", "a, b = 512, 1024", 1024),
        ("Limits.row", "class Limits:\n    row = 1024", 1024),
        ("limits.row", "class Limits:\n    row: int = 1024\nlimits = Limits()", 1024),
        ("limits.row", "class Limits:\n    row: int = 512\nlimits = Limits(row=1024)", 1024),
        ("limits.row", "class Limits:\n    row: int = field(default=1024)\nlimits = Limits()", 1024),
        ("o.row", "p.add_argument('--row', type=int, default=1024)\no = p.parse_args()", 1024),
        ("o.max_row", "p.add_argument('-m', '--max-row', default=1024)\no = p.parse_args()", 1024),
        ("o.row", "p.add_argument('--length', dest='row', default=1024)\no, _ = p.parse_known_args()", 1024),
    ],
)
def test_what_is_known_without_running(expression, before, expected):
    assert value(expression, before) == expected


@pytest.mark.parametrize(
    ("expression", "before", "why"),
    [
        ("longest(rows)", "", "a call"),
        ("LENGTH", "", "bound nowhere"),
        ("LENGTH", "LENGTH = 512\nLENGTH = 1024", "bound in lines 3, 4"),
        ("LENGTH", "LENGTH = 512\nLENGTH += 1", "changed in line 4"),
        ("LENGTH", "for LENGTH in range(9): pass", "the loop in line 3"),
        ("LENGTH", "LENGTH = LENGTH", "bound to itself"),
        ("limits['row']", "limits = {'row': 1}\nlimits.update(other)", "changed in line 4"),
        ("o.row", "p.add_argument('--row', required=True)\no = p.parse_args()", "without a default"),
        ("o.row", "(o,) = TrlParser(SFTConfig).parse_args_and_config()", "library's dataclass"),
        ("int(os.environ['ROW'])", "", "the environment decides it"),
        ("9 ** 9 ** 9", "", "very large"),
        ("'ab' * 999999999", "", "an operator"),
        ("1 // 0", "", "ZeroDivisionError"),
    ],
)
def test_what_only_running_would_tell_is_named_with_its_line(expression, before, why):
    found = value(expression, before)
    assert isinstance(found, Computed)
    assert why in found.why
    with pytest.raises(UserError, match="which only running it would tell") as caught:
        recipe(script(f"max_steps=9, max_length={expression}", before))
    assert "max_length is" in str(caught.value)
    assert "train.py:" in str(caught.value)
    assert "--set max_length=VALUE" in str(caught.value)


def test_a_value_given_by_hand_takes_its_place():
    text = script("max_steps=9, max_length=longest(rows), learning_rate=rate()")
    by_hand = {"max_length": 512, "learning_rate": "3e-4"}
    result = port(read(text, "train.py", None, by_hand), 1, Answers(data="rows.jsonl")).recipe
    assert (result.max_length, result.optimizer.learning_rate) == (512, 3e-4)


def test_nothing_is_run(tmp_path):
    target = tmp_path / "ran"
    text = script(f"max_steps=9, seed=open(r'{target}', 'w').write('x')", before=f"open(r'{target}', 'w')\n")
    with pytest.raises(UserError):
        recipe(text)
    assert not target.exists()


def test_a_function_with_defaults_is_its_defaults_unless_it_is_called_otherwise():
    body = (
        "def train(rate: float = 3e-4):\n    global config\n    config = SFTConfig(max_steps=9, learning_rate=rate)\n"
    )
    rest = "    SFTTrainer(model='google/gemma-3-1b-it', args=config)\n"
    assert recipe(IMPORTS + body + rest + "train()\n").optimizer.learning_rate == 3e-4
    with pytest.raises(UserError, match="an argument of train"):
        recipe(IMPORTS + body + rest + "train(1e-5)\n")


def test_arguments_out_of_a_dictionary():
    before = "extra = {'max_steps': 9, 'learning_rate': 3e-4}"
    assert recipe(script("**extra", before)).optimizer.learning_rate == 3e-4
    with pytest.raises(UserError, match=r"what \*\*extra holds is not known"):
        recipe(script("**extra", "extra = load()"))


def test_a_setting_behind_the_configuration():
    with pytest.raises(UserError, match="contradict each other"):
        recipe(script("max_steps=9, learning_rate=1e-4", after="config.learning_rate = 2e-4"))
    assert recipe(script("max_steps=9", after="config.learning_rate = 2e-4")).optimizer.learning_rate == 2e-4


def test_several_trainers():
    with pytest.raises(UserError, match=r"several trainers: SFTTrainer in line 5, SFTTrainer in line 6") as caught:
        recipe(script("max_steps=9", after="again = SFTTrainer(model='x')"))
    assert caught.value.fix


def test_two_adapters():
    with pytest.raises(UserError, match="more than one adapter"):
        recipe(script("max_steps=9", before="other = LoraConfig(r=2)"))


def test_a_model_that_is_loaded_again_behind_the_training_is_not_its_model():
    load = "model = AutoModelForCausalLM.from_pretrained('google/gemma-3-{}-it')"
    text = script("max_steps=9", before=load.format("4b"), after=load.format("1b"), model="model")
    gpu = read(text, "train.py")
    assert gpu.named()["model"].value == "google/gemma-3-4b-it"
    assert [s.where for s in gpu.settings if s.name == "not_training"] == ["train.py:6"]


def test_branches_that_never_run():
    assert recipe(script("max_steps=9", before="if False:\n    other = LoraConfig(r=2)")).lora.rank == 8


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 1", "builds no trainer"),
        ("def f(:", "is not Python"),
        ("x = '\0'", "is no"),
        (IMPORTS + "a = TrlParser((SFTConfig,)).parse_args_and_config()\nSFTTrainer(args=a)", "from a command line"),
        (script("max_steps=9, frob=1"), None),
    ],
)
def test_scripts_that_say_nothing(text, message):
    if message is None:
        assert [u.key for u in read(text, "train.py").unknown] == ["frob"]
        return
    with pytest.raises(UserError, match=message):
        read(text, "train.py")


@pytest.mark.parametrize("trainer", ["DPOTrainer", "GRPOTrainer", "RewardTrainer", "MyTrainer"])
def test_other_trainers_are_refused(trainer):
    with pytest.raises(UserError, match=f"--accept {trainer}"):
        recipe(script("max_steps=9").replace("trainer = SFTTrainer", f"trainer = {trainer}"))


@pytest.mark.parametrize("argument", ["optimizers=(adam, None)", "compute_loss_func=focal"])
def test_an_optimiser_or_a_loss_of_the_scripts_own_is_refused(argument):
    name = argument.partition("=")[0]
    with pytest.raises(UserError, match=f"--accept {name}"):
        recipe(script("max_steps=9").replace("train_dataset=rows", argument))


def test_defaults_are_those_of_the_class_that_is_called():
    sft, plain = (
        recipe(script("max_steps=9")),
        recipe(script("max_steps=9").replace("SFTConfig(", "TrainingArguments(")),
    )
    assert (sft.optimizer.learning_rate, sft.remat, sft.max_length) == (2e-5, "block", 1024)
    assert (plain.optimizer.learning_rate, plain.remat, plain.max_length) == (5e-5, "none", 1024)


def test_unsloth_loads_in_4_bits_unless_told_otherwise():
    text = """
from unsloth import FastLanguageModel
from trl import SFTConfig, SFTTrainer
model, tokenizer = FastLanguageModel.from_pretrained("google/gemma-3-1b-it", max_seq_length=1024{})
model = FastLanguageModel.get_peft_model(model, r=8)
SFTTrainer(model=model, args=SFTConfig(max_steps=9))
"""
    assert recipe(text.format("")).lora.quantize == "nf4"
    assert recipe(text.format(", load_in_4bit=False")).lora.quantize == "none"
    assert recipe(text.format(", load_in_8bit=True")).lora.quantize == "int8"
    adapted = recipe(text.format("")).lora
    assert (adapted.alpha, len(adapted.targets)) == (16, 7)


def test_a_quantisation_without_a_type_is_fp4():
    """bitsandbytes' default, which is said, as nf4 takes its place."""
    before = "bits = BitsAndBytesConfig(load_in_4bit=True)"
    result = port(read(script("max_steps=9", before), "train.py"), 1, Answers(data="rows.jsonl"))
    assert result.recipe.lora.quantize == "nf4"
    assert [(n.setting.value, n.fate) for n in result.notes if n.setting.name == "bnb_4bit_quant_type"] == [
        ("fp4", "changes")
    ]


def test_a_notebook_is_its_code_cells():
    cells = [
        {"cell_type": "markdown", "source": ["# Not Python ("]},
        {"cell_type": "code", "source": ["%pip install trl\n", "!nvidia-smi\n", IMPORTS]},
        {"cell_type": "code", "source": ["%%bash\n", "not python at all ("]},
        {"cell_type": "code", "source": script("max_steps=9").splitlines(keepends=True)},
    ]
    assert recipe(json.dumps({"cells": cells}), "train.ipynb") == recipe(script("max_steps=9"), "train.py")
    with pytest.raises(UserError, match="is no notebook"):
        read("{}", "train.ipynb")
