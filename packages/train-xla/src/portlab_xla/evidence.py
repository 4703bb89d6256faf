"""Evidence of train-xla: `python -m portlab_xla.evidence WORK OUT [DEVICE]`, see `portlab_spec.evidence`.

TRL's loop takes the steps, as in training; gradients are kept where it hands them to the clip.
"""

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from portlab_spec.cli import run
from portlab_spec.evidence import About, Evidence, Work, find_places, read_work
from portlab_spec.evidence.places import probed, score, scored, token_tensors
from portlab_spec.packing import pack_batch
from portlab_spec.report import versions


def collect(work: Work, device: str) -> Evidence:
    """Run the work with train-xla.

    Args:
        work: to do.
        device: "cpu", "cuda" or "xla".

    Raises:
        UserError: as `portlab_xla.setup.set_up`.
    """
    from portlab_hf.evidence import adapter_names
    from portlab_spec.assets import ModelFolder
    from portlab_xla.decode import Decoder
    from portlab_xla.session import LIBRARIES
    from portlab_xla.setup import dtype_of, set_up

    recipe = work.recipe
    setup = set_up(recipe, ModelFolder(work.model, str(work.model), None), work.token_ids, device)  # type: ignore[arg-type]
    names = adapter_names(setup.adapted)
    tensors = trained(setup, "adapter.0.", names)
    setup.adapted.train()
    repeat = look(work, setup, tensors)
    tensors |= train(work, setup, names)
    decoder = Decoder(setup, work.stop_ids, work.new_tokens)
    answers = decoder(work.prompts) if work.prompts else []
    found = setup.device.describe()
    about = About(
        backend="xla",
        dtype="bfloat16" if "bfloat16" in str(dtype_of(recipe, setup.device)) else "float32",
        versions=versions(*LIBRARIES),
        device=f"{found['platform']} {found['kind']} x {found['count']}",
        recipe=recipe,
        model=work.model,
        rows=work.given,
        repeat=repeat,
        generated=tuple(tuple(ids) for ids in answers),
    )
    return Evidence(about, tensors)


def trained(setup: Any, prefix: str, names: dict[str, str], *, gradients: bool = False) -> dict[str, np.ndarray]:
    """The adapter, or its gradients, as tensors of the evidence."""
    import torch

    from portlab_hf.model import trained_parameters

    found = {}
    for name, parameter in trained_parameters(setup.adapted).items():
        value = parameter.grad if gradients else parameter
        found[prefix + names[name]] = torch.zeros_like(parameter) if value is None else value.detach()
    return {name: x.float().numpy().copy() for name, x in setup.device.to_host(found).items()}


def look(work: Work, setup: Any, tensors: dict[str, np.ndarray]) -> float:
    """Add what the first step's forward pass computes; how far two passes are apart, see `About.repeat`."""
    import torch

    from portlab_hf.model import head_logits
    from portlab_hf.watch import watch
    from portlab_xla.inputs import MicroBatch, micro_batches
    from portlab_xla.loss import supervised_hidden

    plan = setup.plan(work.steps, accumulate=work.recipe.accumulate)
    packed = pack_batch(work.steps[0], plan.layout(0))
    places = find_places(packed, work.steps[0])

    def forward() -> list[dict[str, np.ndarray]]:
        found = []
        for part in micro_batches(packed):
            batch = MicroBatch(**setup.device.put_rows(part))
            with torch.no_grad(), watch(setup.base) as seen:
                supervised_hidden(setup.base, setup.config, batch)
            setup.device.sync()
            groups = batch.slots.shape[0]
            host = setup.device.to_host(dict(seen))
            found.append({name: by_group(x.float().numpy(), groups) for name, x in host.items()})
        return found

    seen, again = forward(), forward()
    first, second = (probed(found, places)["hidden.final"] for found in (seen, again))
    tensors |= token_tensors(places) | probed(seen, places)
    states, tokens = scored(places, [found["hidden.final"] for found in seen])

    def head(three: np.ndarray) -> np.ndarray:
        with torch.no_grad():
            hidden = setup.device.everywhere(torch.from_numpy(three)[None].to(setup.device.where))
            logits = head_logits(setup.base, hidden.to(next(setup.base.parameters()).dtype))
        found: np.ndarray = setup.device.to_host({"logits": logits})["logits"].float().numpy()[0]
        return found

    tensors |= score(states, tokens, head)
    return float(np.abs(first - second).max() / np.sqrt(np.square(first).mean()))


def by_group(x: np.ndarray, groups: int) -> np.ndarray:
    """(G R, T, ...) as (G, R T, ...)."""
    return x.reshape(groups, -1, *x.shape[2:])


def train(work: Work, setup: Any, names: dict[str, str]) -> dict[str, np.ndarray]:
    """Take the steps in TRL's loop."""
    from transformers import TrainerCallback

    from portlab_hf.model import trained_parameters
    from portlab_xla.optim import make_optimizer, make_scheduler
    from portlab_xla.trainer import PlannedSFTTrainer, StepBatches

    recipe, found = work.recipe, {}
    numbers: list[tuple[float, ...]] = []
    rates: list[float] = []
    plan = setup.plan(work.steps, accumulate=recipe.accumulate)
    batches = StepBatches(work.steps, plan, setup.device)

    class Recording(PlannedSFTTrainer):
        """The trainer, which keeps the gradients that it is about to clip."""

        def _clip_grad_norm(self, model: Any) -> Any:
            found.update(trained(setup, f"gradient.{len(numbers) + 1}.", names, gradients=True))
            rates.append(float(optimizer.param_groups[0]["lr"]))
            return super()._clip_grad_norm(model)

    class After(TrainerCallback):
        """Reads each step's numbers."""

        trainer: Recording

        def on_substep_end(self, *_: Any, **__: Any) -> None:
            setup.device.sync()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            sums, norm = self.trainer.take_step()
            setup.device.sync()
            numbers.append((float(sums.loss), float(batches.current[1].weights.sum()), float(norm)))
            found.update(trained(setup, f"adapter.{len(numbers)}.", names))

    optimizer = make_optimizer(recipe.optimizer, trained_parameters(setup.adapted).values(), setup.device.zeros_like)
    scheduler = make_scheduler(recipe.optimizer, recipe.steps, 0, optimizer)
    callback = After()
    flat = [row for step in work.steps for row in step]
    with tempfile.TemporaryDirectory() as folder:
        callback.trainer = Recording(setup, flat, batches, (optimizer, scheduler), callback, Path(folder))
        callback.trainer.train()
    for name, column in zip(("loss", "supervised", "grad_norm"), zip(*numbers, strict=True), strict=True):
        found[name] = np.array(column, np.float32)
    found["learning_rate"] = np.array(rates, np.float32)
    return found


def main(argv: list[str]) -> int:
    """Write the evidence of train-xla."""
    work, out, *device = argv
    from portlab_xla import devices

    name = device[0] if device else "cpu"
    devices.set_environment(name, os.environ)  # type: ignore[arg-type]
    from portlab_xla.main_job import quieten

    quieten()
    collect(read_work(Path(work)), name).save(Path(out))
    return 0


if __name__ == "__main__":
    run("portlab_xla.evidence", main, sys.argv[1:])
