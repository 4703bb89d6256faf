"""Three ways to ask for a server are one command line; what contradicts itself is refused."""

import pytest

from portlab_serve.command_line import resolve
from portlab_spec.errors import UserError

WAYS = [
    ((["/m", "--port", "1"]), ""),
    ((["vllm", "serve", "/m", "--port", "1"]), ""),
    ((["--model", "/m", "--port", "1"]), ""),
    ((["--port", "1", "--model=/m"]), ""),
    (([]), "--model /m --port 1"),
    (([]), "vllm serve /m --port 1"),
    ((["/m"]), "--port 1"),
    ((["--port", "1"]), "--model /m"),
]


@pytest.mark.parametrize(("argv", "inherited"), WAYS)
def test_every_way_is_one_command_line(argv: list[str], inherited: str):
    assert resolve(argv, inherited).words == ["--model", "/m", "--port", "1"]


def test_options_go_through_as_they_were_written():
    argv = ["/m", "--max_model_len", "8", "--additional-config.a.b", "1", "-tp", "4", "--lora-modules", "a=b", "c=d"]
    argv += ['--override-generation-config={"a": -1}', "--seed", "-1", "-O3"]
    assert resolve(argv).words == ["--model", *argv]


def test_the_command_line_replaces_an_option_of_vllm_args_and_says_so():
    args = resolve(["/m", "--port", "1"], "--host h --port=2")
    assert args.words == ["--model", "/m", "--host", "h", "--port", "1"]
    assert args.notes == ("--port 1 replaces --port=2 of VLLM_ARGS",)


def test_a_switch_on_the_command_line_replaces_its_opposite():
    assert not resolve(["/m", "--no-enable-lora"], "--enable-lora").is_on("--enable-lora")


def test_a_short_option_replaces_the_long_one():
    assert resolve(["/m", "-tp", "4"], "--tensor-parallel-size 8").words == ["--model", "/m", "-tp", "4"]


def test_the_same_model_twice_is_one():
    assert resolve(["/m", "--model", "/m"], "--model /m").model == "/m"


def test_an_option_that_adds_up_may_stand_twice():
    assert resolve(["/m", "--middleware", "a", "--middleware", "b"]).words.count("--middleware") == 2


@pytest.mark.parametrize(
    ("argv", "inherited", "complaint"),
    [
        ([], "", "no model is named"),
        (["--port", "1"], "--host h", "no model is named"),
        (["/m", "--model", "/n"], "", r"two models are named: /m \(the command line\) and /n"),
        (["/m"], "--model /n", r"two models are named: /n \(VLLM_ARGS\) and /m \(the command line\)"),
        (["/m", "/n"], "", "two models are named"),
        (["/m", "--port", "1", "--port", "2"], "", "--port 1 and --port 2 contradict each other"),
        (["/m", "--lora-modules", "a=b", "--lora_modules", "c=d"], "", "contradict"),
        (["/m", "--enable-lora", "--no-enable-lora"], "", "contradict"),
        (["vllm", "bench", "serve"], "", "vllm bench is not served here"),
        (["vllm"], "", "vllm is not served here"),
        (["--model"], "", "--model has no value"),
        (["/m"], "--host 'h", "VLLM_ARGS: No closing quotation"),
    ],
)
def test_what_cannot_be_meant_is_refused(argv: list[str], inherited: str, complaint: str):
    with pytest.raises(UserError, match=complaint):
        resolve(argv, inherited)
