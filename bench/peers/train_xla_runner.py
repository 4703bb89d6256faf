"""Train a work folder's batches with portlab_xla: TRL's loop over its own packing, loss and optimiser.

    python train_xla_runner.py FOLDER --name NAME --device cpu|cuda|xla [--devices N] [--shapes packed|one|each]

`packed` is what train-xla does. `one` and `each` are the ablation of padding: a row for each example, padded to the
longest example of the whole run or to the longest of its own batch (rounded up to 32, which spares it some shapes).
"""

import argparse
import json
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from exchange import Job, Measured, peak_resident_bytes, read_job
from recipes import recipe_of

from portlab_spec.assets import ModelFolder
from portlab_spec.data.tokens import Row
from portlab_spec.packing import Plan, pack_batch
from portlab_xla import devices

if TYPE_CHECKING:  # torch is imported once the device's variables are set
    from portlab_xla.setup import Setup


def plan_steps(setup: "Setup", batches: list[list[Row]], shapes: str) -> Plan:
    """Layouts of the steps: planned together, or each for itself."""
    if shapes != "each":
        return setup.plan(batches, accumulate=setup.recipe.accumulate)
    alone = [setup.plan([batch], accumulate=setup.recipe.accumulate) for batch in batches]
    layouts = tuple(dict.fromkeys(plan.layouts[0] for plan in alone))
    return replace(alone[0], layouts=layouts, choice=tuple(layouts.index(plan.layouts[0]) for plan in alone))


def train(job: Job, arguments: argparse.Namespace, measured: Measured) -> dict[str, Any]:
    """Take the job's steps; what a device tells of itself afterwards."""
    import torch
    from transformers import TrainerCallback

    from portlab_hf.adapter_files import load_adapter
    from portlab_hf.model import module_prefix, trained_parameters
    from portlab_xla.optim import make_optimizer, make_scheduler
    from portlab_xla.setup import set_up
    from portlab_xla.trainer import PlannedSFTTrainer, StepBatches

    recipe = recipe_of(job, arguments.name, packed=arguments.shapes == "packed")
    model = ModelFolder(Path(job.settings.model), id="benchmark", revision=None)
    setup = set_up(recipe, model, (), arguments.device)
    prefix = f"base_model.model.{module_prefix(setup.base)}"
    values = {f"{prefix}{name[:-2]}.lora_{name[-1].upper()}.weight": value for name, value in job.adapter.items()}
    load_adapter(setup.adapted, {name: torch.from_numpy(value.T.copy()) for name, value in values.items()}, "job")
    rows = [[Row(str(i), tuple(row.ids), tuple(row.loss)) for i, row in enumerate(batch)] for batch in job.batches]
    batches = StepBatches(rows, plan_steps(setup, rows, arguments.shapes), setup.device)
    optimizer = make_optimizer(recipe.optimizer, trained_parameters(setup.adapted).values(), setup.device.zeros_like)
    setup.device.sync()  # what was loaded is there before the first step, not part of its program
    scheduler = make_scheduler(recipe.optimizer, recipe.steps, 0, optimizer)

    class StepTimes(TrainerCallback):
        """Times the steps, each until its loss is on the host."""

        trainer: PlannedSFTTrainer
        started = 0.0

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.started = time.perf_counter()

        def on_substep_end(self, *_: Any, **__: Any) -> None:
            setup.device.sync()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            sums, _norm = self.trainer.take_step()
            setup.device.sync()
            measured.losses.append(float(sums.nll))
            measured.record_step(time.perf_counter() - self.started)

    times = StepTimes()
    times.trainer = PlannedSFTTrainer(
        setup, [row for batch in rows for row in batch], batches, (optimizer, scheduler), times, arguments.folder
    )
    times.trainer.train()
    computed = sum(batches.plan.layout(i).tokens_per_step for i in range(len(rows)))
    packed = sum(int((pack_batch(batch, batches.plan.layout(i)).rows.ends > 0).sum()) for i, batch in enumerate(rows))
    return {
        **setup.device.describe(),
        "compilations": setup.device.compilations(),
        "shapes": len(batches.plan.layouts),
        "computed_tokens": computed,
        "held_tokens": packed,
    }


def main() -> None:
    """Train and leave NAME.json in the folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--name", required=True)
    parser.add_argument("--device", choices=("cpu", "cuda", "xla"), required=True)
    parser.add_argument("--devices", default="1")
    parser.add_argument("--shapes", choices=("packed", "one", "each"), default="packed")
    arguments = parser.parse_args()
    if arguments.device == "xla":
        os.environ.setdefault("CPU_NUM_DEVICES", arguments.devices)
    devices.set_environment(arguments.device, os.environ)
    job, measured = read_job(arguments.folder), Measured()
    device = train(job, arguments, measured)
    measured.peak_memory_bytes = device.get("peak_bytes") or peak_resident_bytes()
    measured.write(arguments.folder, arguments.name, "portlab-train-xla", "torch", "transformers", "trl", "peft")
    file = arguments.folder / f"{arguments.name}.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"device": device}))


if __name__ == "__main__":
    main()
