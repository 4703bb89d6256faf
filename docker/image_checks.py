"""What is tried in the image. A check returns what it saw, for the table, and raises CheckFailed if it is not right."""

import json
import os
import shlex
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import yaml

import stand_in_server
from container_engine import Done, Engine
from portlab_serve.parser_names import PARSER_NAMES
from portlab_spec.errors import CheckFailed

DOCKER = Path(__file__).parent
# Models that compose.yaml names, and what is served in their place.
MODELS = {"/models/${MODEL:-functiongemma-270m}": "/model", "/models/${MODEL:-gemma-4-31b}": "/models/gemma4"}
# Nothing is to be fetched while a model is checked.
OFFLINE = ("--network", "none")
READY_SECONDS, SERVING_SECONDS, STOP_SECONDS = 60, 1200, 60
# Between log probabilities in nats: bfloat16 there, float32 here.
CLOSE = 0.25
IMPORTS = """
import jax, libtpu, torch, tpu_inference, vllm
import portlab_serve.vllm_plugin
from vllm.tool_parsers.abstract_tool_parser import ToolParserManager
for name in {parsers!r}:
    ToolParserManager.get_tool_parser(name)
print("vllm", vllm.__version__, "jax", jax.__version__, "torch", torch.__version__)
"""
# What vLLM's own main() does before it takes a device.
PARSE = """
import json, sys
from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
from vllm.utils.argparse_utils import FlexibleArgumentParser
for words in json.load(sys.stdin):
    args = make_arg_parser(FlexibleArgumentParser()).parse_args(words)
    validate_parsed_serve_args(args)
print("parsed", args.model)
"""

TOKENS = 16
COMPLETE = """
import json, urllib.request
body = {body!r} | {{"prompt": "The capital of France is", "return_token_ids": True}}
request = urllib.request.Request(
    "http://127.0.0.1:8000/v1/completions", json.dumps(body).encode(), {{"Content-Type": "application/json"}})
print(urllib.request.urlopen(request, timeout=600).read().decode())
"""

WITHOUT_TPU = (
    *(word for setting in (
        "JAX_PLATFORMS=cpu",
        "JAX_CPU_ENABLE_ASYNC_DISPATCH=false",  # one run without it answered otherwise: arrays may share NumPy's memory
        "SKIP_JAX_PRECOMPILE=1",
        "HF_HUB_OFFLINE=1",
        "PYTHONPATH=/without_tpu",
    ) for word in ("--env", setting)),
    *("--volume", f"{DOCKER / 'without_tpu'}:/without_tpu:ro"),
)  # fmt: skip


@dataclass(frozen=True)
class Trial:
    """An image and what it is tried with.

    Attributes:
        engine: runs it.
        image: its name.
        model: a FunctionGemma that can be served, at /model in the image.
        models: folder of models, at /models: `gemma4`, tiny; `bad`, spoilt; `slow`, which is never read to its end;
            `adapter`, a random one of `model`.
        stand_in: folder with a package `vllm` that is no more than stand_in_server.
    """

    engine: Engine
    image: str
    model: Path
    models: Path
    stand_in: Path

    def run(self, *words: str, options: tuple[str, ...] = OFFLINE) -> Done:
        """Run the image on `words`, with the models in their places."""
        return self.engine.run(self.image, *words, options=(*self._mounts, *options))

    def python(self, code: str, *options: str) -> Done:
        """Run Python code in the image."""
        return self.run("-c", code, options=(*OFFLINE, *options, "--entrypoint", "python"))

    @contextmanager
    def server(self, *words: str, options: tuple[str, ...] = OFFLINE, until: str = "ready") -> Iterator[str]:
        """The image, started on `words` with the stand-in server, once it has printed `until`."""
        stand_in = ("--volume", f"{self.stand_in}:/stand-in:ro", "--env", "PYTHONPATH=/stand-in")
        with self.container(*words, options=(*stand_in, *options)) as container:
            if until:
                self.printed(container, until, READY_SECONDS)
            yield container

    def container(self, *words: str, options: tuple[str, ...]) -> AbstractContextManager[str]:
        """The image on `words`, in the background."""
        return self.engine.running(self.image, *words, options=(*self._mounts, *options))

    def printed(self, container: str, text: str, seconds: float) -> str:
        """Wait for a line with `text`, and return it."""
        deadline = time.monotonic() + seconds
        while not (lines := [line for line in self.engine.logs(container).splitlines() if text in line]):
            last = self.engine.logs(container)[-300:]
            require(self.engine.is_running(container), f"it ended: {last}")
            require(time.monotonic() < deadline, f"{text!r} is not printed in {seconds:.0f} s: {last}")
            time.sleep(0.5)
        return lines[0]

    @property
    def _mounts(self) -> tuple[str, ...]:
        return ("--volume", f"{self.model}:/model:ro", "--volume", f"{self.models}:/models:ro")


def require(true: object, otherwise: str) -> None:
    """Raise CheckFailed unless `true`."""
    if not true:
        raise CheckFailed(otherwise)


def ended(done: Done, code: int) -> Done:
    """Hold a command to its exit code."""
    require(done.code == code, f"exit code {done.code}, not {code}: {done.last_line}")
    return done


# -------------------------------------------------------------------------------------------- its description


def description(trial: Trial) -> str:
    """entrypoint, volume, port, stop signal, health check, labels"""
    config = trial.engine.inspect(trial.image)["Config"]
    require(config["Entrypoint"] == ["portlab-serve"], f"entrypoint {config['Entrypoint']}")
    require(not config.get("User"), f"user {config.get('User')}")
    require(config["StopSignal"] in ("SIGTERM", "15"), f"stop signal {config['StopSignal']}")
    require(set(config["Volumes"]) == {"/cache"}, f"volumes {config['Volumes']}")
    require(set(config["ExposedPorts"]) == {"8000/tcp"}, f"ports {config['ExposedPorts']}")
    require(config["Healthcheck"]["Test"][0] == "CMD", f"health check {config['Healthcheck']}")
    labels = {key.rpartition(".")[2]: value for key, value in config["Labels"].items() if "opencontainers" in key}
    require({"title", "description", "licenses", "version", "revision"} <= set(labels), f"labels {sorted(labels)}")
    return f"{labels['title']} {labels['version']} {labels['revision'][:12]}"


def sizes(trial: Trial) -> str:
    """layers and their sizes"""
    layers = [layer for layer in trial.engine.layers(trial.image) if layer.size]
    require(len(layers) >= 3, f"{len(layers)} layers")
    sizes = " + ".join(f"{layer.size / 1e6:,.0f}" for layer in layers)
    return f"{sum(layer.size for layer in layers) / 1e9:.2f} GB: {sizes} MB"


def requirements(trial: Trial) -> str:
    """pip check: what is installed agrees"""
    return ended(trial.run("-m", "pip", "check", options=(*OFFLINE, "--entrypoint", "python")), 0).out.strip()


def imports(trial: Trial) -> str:
    """vllm, tpu_inference and our tool parsers are imported"""
    return ended(trial.python(IMPORTS.format(parsers=list(PARSER_NAMES.values()))), 0).out.strip().splitlines()[-1]


# --------------------------------------------------------------------------------------------- portlab-serve


def help_text(trial: Trial) -> str:
    """--help"""
    return ended(trial.run("--help"), 0).out.strip().splitlines()[0]


def good_model(trial: Trial) -> str:
    """a good model passes, as user portlab without privileges"""
    return ended(trial.run("/model", "--preflight-only", options=(*OFFLINE, "--user", "portlab")), 0).last_line


def gemma4_model(trial: Trial) -> str:
    """a Gemma 4 passes, for the model in JAX"""
    done = ended(trial.run("/models/gemma4", "--preflight-only"), 0)
    require(done.last_line == "preflight: ok (vllm-tpu, jax)", done.last_line)
    return done.last_line


def bad_model(trial: Trial) -> str:
    """a bad model is refused with one line and exit code 1"""
    done = ended(trial.run("/models/bad"), 1)
    require("Traceback" not in done.err, "a traceback")
    require(done.last_line.startswith("portlab-serve: error: the preflight found"), done.last_line)
    return done.last_line


def bad_command(trial: Trial) -> str:
    """a command line without model is refused with exit code 2"""
    done = ended(trial.run(), 2)
    require(done.err.count("\n") == 1, f"more than a line: {done.err}")
    return done.last_line


def printed_command(trial: Trial) -> str:
    """--model X, vllm serve X and VLLM_ARGS print one command, with a template that is there"""
    variable = ("--env", "VLLM_ARGS=--model /model --port 9")
    ways = (
        trial.run("--model", "/model", "--port", "9", "--print-command"),
        trial.run("vllm", "serve", "/model", "--port", "9", "--print-command"),
        trial.run("--print-command", options=(*OFFLINE, *variable)),
    )
    commands = {ended(done, 0).last_line for done in ways}
    require(len(commands) == 1, f"{len(commands)} commands")
    words = shlex.split(commands.pop())
    require("VLLM_XLA_CACHE_PATH=/cache/xla" in words, "the cache is not /cache")
    template = words[words.index("--chat-template") + 1]
    ended(trial.run("-f", template, options=(*OFFLINE, "--entrypoint", "test")), 0)
    return " ".join(words[words.index("-m") : words.index("-m") + 6]) + " ..."


def flags(trial: Trial) -> str:
    """vLLM's own parser takes that command, and those of compose.yaml"""
    services = yaml.safe_load((DOCKER / "compose.yaml").read_text(encoding="utf-8"))["services"]
    commands = []
    for service in services.values():
        words = [MODELS.get(word, word) for word in service["command"]]
        done = ended(trial.run(*words, "--print-command", "--json"), 0)
        command = json.loads(done.out)["command"]
        commands.append(command[command.index("--model") :])
    code = PARSE.replace("json.load(sys.stdin)", repr(commands))
    return ended(trial.python(code), 0).out.strip().splitlines()[-1] + f" and {len(commands) - 1} more"


def caches(trial: Trial) -> str:
    """user portlab may write to /cache"""
    code = "from pathlib import Path; path = Path('/cache/xla'); path.mkdir(); print(path.owner(), path)"
    return ended(trial.python(code, "--user", "portlab"), 0).last_line


# ------------------------------------------------------------------------------------------------- a server


def issue_command(trial: Trial) -> str:
    """run --privileged --net host -v MODEL:/model IMAGE --model /model starts a server"""
    port = ("--port", "18765")  # on the host's network: 8000 may be taken
    with trial.server("--model", "/model", *port, options=("--privileged", "--net", "host")) as container:
        return next(line for line in trial.engine.logs(container).splitlines() if "--model /model" in line)


def health(trial: Trial) -> str:
    """the health check follows the server, on whichever port"""
    (_, *test) = trial.engine.inspect(trial.image)["Config"]["Healthcheck"]["Test"]
    with trial.server("/model", "--port", "8123") as container:
        healthy = ended(trial.engine.exec(container, *test), 0)
    with trial.server("/models/slow", until="") as container:
        unhealthy = ended(trial.engine.exec(container, *test), 1)
    return f"{healthy.last_line}; without server: {unhealthy.last_line}"


@contextmanager
def being_read(pipe: Path) -> Iterator[None]:
    """Wait until somebody reads a named pipe, and let them wait for its end."""
    deadline = time.monotonic() + READY_SECONDS
    while True:
        try:
            descriptor = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)  # fails as long as nobody reads
            break
        except OSError as error:
            require(time.monotonic() < deadline, f"{pipe.name} is not read: {error.strerror}")
            time.sleep(0.1)
    try:
        yield
    finally:
        os.close(descriptor)


def stop(trial: Trial) -> str:
    """`stop` reaches the server, whose exit code is the container's"""
    with trial.server("/model") as container:
        code = trial.engine.stop(container, STOP_SECONDS)
    require(code == stand_in_server.EXIT_CODE, f"exit code {code}, not {stand_in_server.EXIT_CODE}")
    return f"exit code {code}"


def early_stop(trial: Trial) -> str:
    """`stop` ends it while it still checks"""
    with trial.server("/models/slow", until="") as container, being_read(trial.models / "slow" / "config.json"):
        code = trial.engine.stop(container, STOP_SECONDS)
    require(code == 128 + 15, f"exit code {code}, not 143")
    return f"exit code {code}"


def attention(trial: Trial) -> str:
    """the plain attention is what the kernel's own reference computes"""
    options = (*OFFLINE, *WITHOUT_TPU, "--entrypoint", "python")
    found = float(ended(trial.run("/without_tpu/check_attention.py", options=options), 0).out.split()[-1])
    require(found < 1e-5, f"differs by {found}")
    return f"differs by {found:.1g} at most"


def served(trial: Trial) -> str:
    """vLLM-TPU on the CPU, with plain attention: base and adapter answer as in transformers and PEFT"""
    words = ("--max-model-len", "64", "--max-num-seqs", "1", "--max-num-batched-tokens", "64")
    adapter = ("--lora-modules", "random=/models/adapter", "--check-adapter")
    with trial.container("/model", *words, *adapter, options=(*OFFLINE, *WITHOUT_TPU)) as container:
        effect = trial.printed(container, "adapter random: ", SERVING_SECONDS)
        distances = [
            distance(trial, container, "/model", None),
            distance(trial, container, "random", trial.models / "adapter"),
        ]
        code = trial.engine.stop(container, STOP_SECONDS)
    require(max(distances) < CLOSE, f"log probabilities differ by {distances} (base, adapter)")
    require(code == 0, f"exit code {code} after stop")
    return f"{TOKENS} tokens within {distances[0]:.2g} nats, with the adapter {distances[1]:.2g}; {effect}; exit code 0"


def distance(trial: Trial, container: str, name: str, adapter: Path | None) -> float:
    """How far a served model's log probabilities of its own answer are from those of transformers and PEFT, in nats."""
    code = COMPLETE.format(body={"model": name, "max_tokens": TOKENS, "temperature": 0, "logprobs": 1})
    answer = json.loads(ended(trial.engine.exec(container, "python", "-c", code), 0).out)["choices"][0]
    expected = logprobs(trial.model, adapter, answer["prompt_token_ids"], answer["token_ids"])
    return max(abs(a - b) for a, b in zip(expected, answer["logprobs"]["token_logprobs"], strict=True))


def logprobs(model: Path, adapter: Path | None, prompt: list[int], tokens: list[int]) -> list[float]:
    """Log probability of each token after a prompt, in float32."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    network = PeftModel.from_pretrained(network, adapter).eval() if adapter else network
    with torch.no_grad():
        scores = network(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    return scores.gather(1, torch.tensor(tokens)[:, None])[:, 0].tolist()


def no_tpu(trial: Trial) -> str:
    """without a TPU, vLLM's error is shown and its exit code returned"""
    done = trial.run("/model", "--max-model-len", "64")
    require(done.code not in (0, 125, 126, 127), f"exit code {done.code}: {done.last_line}")
    require("preflight: ok (vllm-tpu, torchax)" in done.err, done.last_line)
    return f"exit code {done.code}: {done.last_line}"


CHECKS: tuple[Callable[[Trial], str], ...] = (
    description,
    sizes,
    requirements,
    imports,
    help_text,
    good_model,
    gemma4_model,
    bad_model,
    bad_command,
    printed_command,
    flags,
    caches,
    issue_command,
    health,
    stop,
    early_stop,
    attention,
    served,
    no_tpu,
)
