"""What train-xla does in the places where the stock stack fails: the same toys, through its own modules.

Run as `train-xla --device xla` runs: SPMD on four devices of the CPU, in one process.
"""

import functools
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch_xla.debug.metrics as met
from observe import observe
from peft import PeftModel
from toys import VOCAB, gemma3, gemma4, rows, tokenizer
from transformers import PreTrainedModel

from portlab_spec.assets import ModelFolder
from portlab_spec.data.tokens import Row
from portlab_spec.packing import BatchOrder
from portlab_spec.recipe import Lora, Recipe
from portlab_spec.run.job import Trained
from portlab_xla.checkpoint import Checkpoints
from portlab_xla.session import describe_run
from portlab_xla.setup import Setup, set_up
from portlab_xla.steps import MonitoredLoss, train

FOLDER = Path(tempfile.mkdtemp())
LENGTHS = (20, 21, 22, 23, 24, 8)  # each new; the last is shorter than the sliding window


def model_folder(model: PreTrainedModel) -> ModelFolder:
    path = FOLDER / type(model).__name__
    model.save_pretrained(path)
    tokenizer().save_pretrained(path)
    return ModelFolder(path, "toy", None)


def recipe(**more: Any) -> Recipe:
    settings = {"lora": Lora(rank=4), "steps": 6, "batch_size": 4, "max_length": 64, "share_prefix": False}
    return Recipe(**{**settings, "remat": "block", "save_every": 3, "log_every": 6, **more})


def token_rows(lengths: tuple[int, ...], copies: int = 4) -> list[Row]:
    """Rows whose every token but the first is supervised."""
    draw = torch.Generator().manual_seed(2)
    drawn = [torch.randint(3, VOCAB, (n,), generator=draw).tolist() for n in lengths for _ in range(copies)]
    return [Row(str(i), tuple(ids), (False, *[True] * (len(ids) - 1))) for i, ids in enumerate(drawn)]


class CountingCheckpoints(Checkpoints):
    """Notes how often the device was read from the first step's begin to when the first checkpoint is due."""

    reads: int | None = None
    before: int | None = None

    def begin_step(self) -> None:
        self.before = reads() if self.before is None else self.before

    def save_step(self, *args: Any) -> None:
        if self.reads is None:
            self.reads = reads() - (self.before or 0)
        super().save_step(*args)


def reads() -> int:
    return (met.metric_data("TransferFromDeviceTime") or (0,))[0]


def run(setup: Setup, folder: Path) -> tuple[Trained, CountingCheckpoints]:
    folder.mkdir(exist_ok=True)
    train_rows = token_rows(LENGTHS)
    order = BatchOrder(train_rows, setup.recipe.batch_size, setup.recipe.steps, seed=0)
    checkpoints = CountingCheckpoints(folder / "checkpoints", describe_run(setup, order), keep=2, keep_best=False)
    met.clear_all()
    seed = setup.device.seed  # called as each step begins

    def seed_and_note(number: int) -> None:
        checkpoints.begin_step()
        seed(number)

    setup.device.seed = seed_and_note
    return train(setup, train_rows, [], checkpoints, order, folder=folder, say=lambda line: None), checkpoints


@functools.cache
def gemma3_run() -> tuple[Setup, Trained, CountingCheckpoints]:
    setup = set_up(recipe(), model_folder(gemma3()), (), "xla")
    return setup, *run(setup, FOLDER / "run")


def ties_and_names() -> dict[str, Any]:
    """After training: the embedding's two places, and the names of what is adapted."""
    setup, _, _ = gemma3_run()
    names = [name for name, _ in setup.adapted.named_parameters()]
    tied = setup.base.lm_head.weight is setup.base.get_input_embeddings().weight
    return {"tied": tied, "wrapped": [name for name in names if "_orig_module" in name]}


def graphs_and_reads() -> dict[str, Any]:
    """Of six steps over six lengths, with recomputation; and reads of the first three, at whose end numbers are due."""
    _, found, checkpoints = gemma3_run()
    counted = {"planned": found.device["graphs"], "unplanned": found.device["graphs_after_warm_up"]}
    return {"steps": found.step, **counted, "reads_of_three_steps": checkpoints.reads}


def checkpoint_files() -> dict[str, Any]:
    gemma3_run()
    return {"files": sorted(path.name for path in (FOLDER / "run/checkpoints/6").iterdir())}


def adapter_in_plain_peft() -> dict[str, Any]:
    """Logits of the saved adapter on the CPU, against those of the model on the device and against the base's."""
    setup, _, _ = gemma3_run()
    ids_BT = torch.tensor(rows(4)["input_ids"])
    reloaded = PeftModel.from_pretrained(gemma3(), FOLDER / "run/checkpoints/6").eval()
    with torch.no_grad():
        plain = reloaded(ids_BT).logits
        base = gemma3().eval()(ids_BT).logits
        device = setup.adapted.eval()(input_ids=ids_BT.to("xla")).logits.cpu()
    return {"from_device": (plain - device).abs().max().item(), "from_base": (plain - base).abs().max().item()}


def evaluated_rows() -> dict[str, Any]:
    """The monitored loss of ten rows in batches of four, against the mean of all ten on the CPU."""
    setup, _, _ = gemma3_run()
    ten = token_rows((24,), copies=10)
    reloaded = PeftModel.from_pretrained(gemma3(), FOLDER / "run/checkpoints/6").eval()
    ids_BT = torch.tensor([row.ids for row in ten])
    with torch.no_grad():
        whole, first_eight = (reloaded(input_ids=ids, labels=ids).loss.item() for ids in (ids_BT, ids_BT[:8]))
    return {"monitored": MonitoredLoss(setup, ten)(), "of_ten": whole, "of_eight": first_eight}


def resumed_run() -> dict[str, Any]:
    """The last checkpoint is lost, and the run started again with a model fresh from the disk."""
    _, whole, _ = gemma3_run()
    shutil.rmtree(FOLDER / "run/checkpoints/6")
    found, _ = run(set_up(recipe(), model_folder(gemma3()), (), "xla"), FOLDER / "run")
    return {"fresh_steps": found.fresh_steps, "same_losses": found.log.losses == whole.log.losses}


def gemma4_trains() -> dict[str, Any]:
    setup = set_up(recipe(steps=3, lora=Lora(rank=4, targets=("q_proj", "v_proj"))), model_folder(gemma4()), (), "xla")
    found, _ = run(setup, FOLDER / "gemma4")
    return {"steps": found.step, "adapted": len(setup.leaves), "unplanned": found.device["graphs_after_warm_up"]}


if __name__ == "__main__":
    observe(
        ties_and_names,
        graphs_and_reads,
        checkpoint_files,
        adapter_in_plain_peft,
        evaluated_rows,
        gemma4_trains,
        resumed_run,
    )
