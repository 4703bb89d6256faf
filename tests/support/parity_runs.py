"""Short training runs on toy Gemmas in PyTorch, several in one process: what a process can import it can be only once.

python parity_runs.py RUNS.json HOW    writes each run's folder, and prints {name: result}

HOW is a device of train-xla's, "torchax" for train-torchax, or "plain": transformers, PEFT and PyTorch's own AdamW over
one row at a time, without any of the trainers' arithmetic.
"""

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from toy_rows import plain_rows, tool_rows

from portlab_spec.recipe import Recipe
from portlab_spec.run.trackers import METRICS_FILE

TOKEN_IDS = (3, 5)


@dataclass(frozen=True)
class Run:
    """One run.

    Attributes:
        model: folder of the base.
        folder: of the run.
        recipe: fields of it.
        plain: train on rows that share nothing.
        rows: so many.
        monitored: so many other rows are monitored.
        uneven: shapes change behind the plan's back, see `widened`.
    """

    model: str
    folder: str
    recipe: dict[str, Any]
    plain: bool = False
    rows: int = 24
    monitored: int = 0
    token_ids: tuple[int, ...] = TOKEN_IDS
    uneven: bool = False


def run_in_torch(file: Path, runs: Mapping[str, Run], how: str, *, devices: int = 1) -> dict[str, dict[str, Any]]:
    """Do runs in another process.

    Args:
        file: to write, for this module to read as a program.
        runs: by name.
        how: see the module.
        devices: that the CPU plays for "xla".
    """
    file.write_text(json.dumps({name: asdict(run) for name, run in runs.items()}))
    done = subprocess.run(
        [sys.executable, __file__, str(file), how],
        env=os.environ
        | {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": str(devices), "OMP_NUM_THREADS": "1"}
        | {"JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return found


def metrics(folder: str | Path, name: str) -> list[float]:
    """One metric of every step of a run."""
    lines = [json.loads(line) for line in (Path(folder) / METRICS_FILE).read_text().splitlines()]
    return [line[name] for line in lines if name in line]


def main(file: Path, how: str) -> None:
    """Do the runs of a file, one after the other."""
    runs = {name: Run(**fields) for name, fields in json.loads(file.read_text()).items()}
    if how == "plain":
        do = train_plainly
    elif how == "torchax":
        do = train_with_torchax
    else:
        from portlab_xla import devices

        devices.set_environment(how, os.environ)  # type: ignore[arg-type]
        from portlab_xla.main_job import quieten

        quieten()
        do = partial(train, device=how)
    print(json.dumps({name: do(run) for name, run in runs.items()}))


def train(run: Run, device: str) -> dict[str, Any]:
    """Train as train-xla does."""
    from portlab_spec.assets import ModelFolder
    from portlab_spec.packing import BatchOrder
    from portlab_xla import steps
    from portlab_xla.checkpoint import Checkpoints
    from portlab_xla.setup import set_up

    recipe, said = Recipe.model_validate(run.recipe), []
    rows = plain_rows(run.rows) if run.plain else tool_rows(run.rows)
    setup = set_up(recipe, ModelFolder(Path(run.model), "toy", None), tuple(run.token_ids), device)  # type: ignore[arg-type]
    folder = Path(run.folder)
    folder.mkdir(parents=True, exist_ok=True)
    order = BatchOrder(rows, recipe.batch_size, recipe.steps, recipe.seed)
    checkpoints = Checkpoints(folder / "checkpoints", {}, keep=recipe.keep, keep_best=recipe.keep_best)
    monitored = tool_rows(run.monitored, seed=1)
    with widened() if run.uneven else nullcontext():
        trained = steps.train(setup, rows, monitored, checkpoints, order, folder=folder, say=said.append)
    return {
        "evals": trained.log.evals,
        **trained.device,
        "layouts": len(trained.plan.layouts),
        "mesh": dict(setup.device.shape),
        "said": said,
        "placed": placement(setup) if device == "xla" else {},
        "ties": ties(setup.adapted),
    }


@contextmanager
def widened() -> Iterator[None]:
    """Have every other step from the fifth on come with more slots than the plan gave it, all of them ignored."""
    from torch.nn.functional import pad

    from portlab_xla import trainer

    original, numbers = trainer.micro_batches, itertools.count(1)

    def micro_batches(batch: Any) -> list[Any]:
        number, parts = next(numbers), original(batch)
        if number < 5 or number % 2 == 0:
            return parts
        return [part | {name: pad(part[name], (0, 8)) for name in ("slots", "targets", "weights")} for part in parts]

    trainer.micro_batches = micro_batches
    try:
        yield
    finally:
        trainer.micro_batches = original


def placement(setup: Any) -> dict[str, str]:
    """How torch_xla has each parameter cut."""
    import torch_xla

    parameters = setup.adapted.named_parameters(remove_duplicate=False)
    return {name: torch_xla._XLAC._get_xla_sharding_spec(parameter) for name, parameter in parameters}


def ties(model: Any) -> list[list[str]]:
    """Names of parameters that are one."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [group for group in names.values() if len(group) > 1]


def train_with_torchax(run: Run) -> dict[str, Any]:
    """Train as train-torchax does."""
    from portlab_spec.assets import ModelFolder
    from portlab_spec.packing import BatchOrder
    from portlab_spec.run.data import RunRows
    from portlab_torchax.main_job import quieten
    from portlab_torchax.session import TorchaxSession
    from portlab_torchax.setup import set_up

    quieten()
    recipe, said = Recipe.model_validate(run.recipe), []
    rows = plain_rows(run.rows) if run.plain else tool_rows(run.rows)
    folder = Path(run.folder)
    folder.mkdir(parents=True, exist_ok=True)
    session = TorchaxSession(set_up(recipe, ModelFolder(Path(run.model), "toy", None), tuple(run.token_ids)))
    order = BatchOrder(rows, recipe.batch_size, recipe.steps, recipe.seed)
    trained = session.train(RunRows(rows, [], tool_rows(run.monitored, seed=1)), order, folder, said.append)
    return {"evals": trained.log.evals, **trained.device, "layouts": len(trained.plan.layouts), "said": said}


def train_plainly(run: Run) -> dict[str, Any]:
    """Train in the plainest way that transformers and PEFT offer, from the adapter that the recipe starts from."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    from portlab_spec.packing import BatchOrder
    from portlab_spec.schedule import learning_rates

    recipe = Recipe.model_validate(run.recipe)
    rows = plain_rows(run.rows) if run.plain else tool_rows(run.rows)
    order = BatchOrder(rows, recipe.batch_size, recipe.steps, recipe.seed)
    base = AutoModelForCausalLM.from_pretrained(run.model, dtype=torch.float32, attn_implementation="eager")
    model = PeftModel.from_pretrained(base, recipe.lora.start_from, is_trainable=True).train()
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    settings = recipe.optimizer
    adamw = torch.optim.AdamW(
        parameters, betas=(settings.b1, settings.b2), eps=settings.eps, weight_decay=settings.weight_decay
    )
    lines = []
    for number, rate in enumerate(learning_rates(settings, recipe.steps)):
        losses = token_losses(model, order[number])
        loss = torch.cat(losses).mean()
        loss.backward()
        grad_norm = torch.nn.utils.clip_grad_norm_(parameters, settings.clip_norm)
        adamw.param_groups[0]["lr"] = float(rate)
        adamw.step()
        adamw.zero_grad()
        lines.append({"step": number + 1, "loss": loss.item(), "grad_norm": grad_norm.item()})
    Path(run.folder).mkdir(parents=True, exist_ok=True)
    (Path(run.folder) / METRICS_FILE).write_text("".join(json.dumps(line) + "\n" for line in lines))
    return {}


def token_losses(model: Any, rows: Sequence[Any]) -> list[Any]:
    """Cross-entropies of the supervised tokens of each row."""
    import torch
    from torch.nn.functional import cross_entropy

    losses = []
    for row in rows:
        logits = model(input_ids=torch.tensor([row.ids]), use_cache=False).logits[0, :-1]
        held = torch.tensor(row.loss)[1:]
        losses.append(cross_entropy(logits[held], torch.tensor(row.ids)[1:][held], reduction="none"))
    return losses


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
