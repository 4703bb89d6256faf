"""TRL's SFTTrainer over batches of planned shapes.

The loop, its callbacks, clipping and the place of the optimiser in it are transformers' and TRL's. Replaced are the
three methods that decide what a step computes: which batch comes next, what its loss is, and what becomes of the
gradient's norm. TRL's loss would compute logits of every token, and read three sums from the device in every step.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from transformers import PreTrainedTokenizerFast, TrainerCallback
from transformers.trainer_callback import PrinterCallback
from trl import SFTConfig, SFTTrainer

from portlab_spec.data.tokens import Row
from portlab_spec.packing import Batch, Plan, pack_batch
from portlab_xla.devices.device import Device, Tensors
from portlab_xla.inputs import MicroBatch, micro_batches
from portlab_xla.loss import Sums, batch_sums
from portlab_xla.setup import Setup

IGNORED = -100  # label of a token that is not supervised


class StepBatches:
    """The micro-batches of a run's steps from one on, each on the device when it is handed out."""

    def __init__(self, order: Sequence[list[Row]], plan: Plan, device: Device, *, first: int = 0) -> None:
        self._order, self.plan, self._device, self._first = order, plan, device, first
        self.current: tuple[list[Row], Batch]  # rows of the latest step, and what they were packed into

    @property
    def chunk(self) -> int:
        """Supervised slots of a group whose logits are in memory at a time."""
        return max(layout.chunk for layout in self.plan.layouts)

    def __len__(self) -> int:
        return (len(self._order) - self._first) * self.plan.layouts[0].accumulate

    def __iter__(self) -> Iterator[Tensors]:
        for number in range(self._first, len(self._order)):
            rows = self._order[number]
            self.current = rows, pack_batch(rows, self.plan.layout(number))
            for tensors in micro_batches(self.current[1]):
                yield self._device.put_rows(tensors)


def labelled(rows: list[Row]) -> Dataset:
    """Rows as TRL takes them when they are tokenised already."""
    columns = {
        "input_ids": [list(row.ids) for row in rows],
        "labels": [[i if held else IGNORED for i, held in zip(row.ids, row.loss, strict=True)] for row in rows],
    }
    return Dataset.from_dict(columns)


def padding_tokenizer() -> PreTrainedTokenizerFast:
    """What TRL asks its tokenizer for where rows are tokens already: Gemma's padding token, and that there is one."""
    vocabulary = {"<pad>": 0, "<eos>": 1, "<bos>": 2}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(vocabulary)), pad_token="<pad>", eos_token="<eos>", bos_token="<bos>"
    )


class PlannedSFTTrainer(SFTTrainer):
    """SFTTrainer whose steps come from a plan."""

    _sums: Sums | None = None  # of the micro-batches of the current step
    _grad_norm: torch.Tensor | None = None

    def __init__(
        self,
        setup: Setup,
        rows: list[Row],
        batches: StepBatches,
        optimizers: tuple[Optimizer, LambdaLR],
        callback: TrainerCallback,
        folder: Path,
    ) -> None:
        """Put a run into TRL's terms.

        Args:
            setup: the run.
            rows: what it trains on.
            batches: of the steps that are left.
            optimizers: optimiser and schedule, in the state that the steps go on from.
            callback: called after every step.
            folder: the run's.
        """
        self._setup, self.batches = setup, batches
        super().__init__(
            model=setup.adapted,
            args=sft_config(setup, len(batches), folder),
            train_dataset=labelled(rows),
            processing_class=padding_tokenizer(),
            optimizers=(optimizers[0], optimizers[1]),
            callbacks=[callback],
        )
        self.remove_callback(PrinterCallback)
        # The loss is divided by the supervised tokens of the whole step, not by the number of micro-batches.
        self.loss_is_scaled_for_ga = True  # type: ignore[assignment]

    def _move_model_to_device(self, model: Any, device: torch.device) -> None:
        """The model is where it belongs; tying it again would fail beside an adapter of the embedding's rows."""

    def get_train_dataloader(self) -> Any:
        return self.batches

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        if self.state.global_step == 0:
            # transformers' running sum starts as a constant, which would make the first step's graph another one.
            self._tr_loss = self._setup.device.put_rows({"zero": torch.zeros(())})["zero"]
        return super().training_step(*args, **kwargs)

    def compute_loss(
        self, model: Any, inputs: Tensors, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> torch.Tensor:
        setup, batch = self._setup, MicroBatch(**inputs)
        sums = batch_sums(
            setup.base,
            setup.config,
            batch,
            setup.device.checkpoint,
            chunk=self.batches.chunk,
            z_loss=setup.recipe.z_loss,
        )
        means = Sums(*(value / batch.total for value in sums))
        so_far = Sums(*(value.detach() for value in means))
        self._sums = so_far if self._sums is None else Sums(*(a + b for a, b in zip(self._sums, so_far, strict=True)))
        return means.loss

    def _clip_grad_norm(self, model: Any) -> torch.Tensor:
        self._grad_norm = super()._clip_grad_norm(model)
        return self._grad_norm

    def take_step(self) -> tuple[Sums, torch.Tensor]:
        """Means over the supervised tokens of the step that was taken, and the norm of its gradient before the clip.

        All are scalars on the device, which nobody has read yet.
        """
        assert self._sums is not None
        assert self._grad_norm is not None
        found = self._sums, self._grad_norm
        self._sums = self._grad_norm = None
        return found


def sft_config(setup: Setup, batches: int, folder: Path) -> SFTConfig:
    """The recipe in TRL's terms. What happens after a step (reading, measuring, saving) is our callback's."""
    recipe = setup.recipe
    return SFTConfig(
        output_dir=str(folder / "trl"),
        max_steps=batches // recipe.accumulate,
        # Rows come packed: a batch of the loader is a micro-batch over all devices.
        per_device_train_batch_size=1,
        gradient_accumulation_steps=recipe.accumulate,
        max_grad_norm=recipe.optimizer.clip_norm,
        learning_rate=recipe.optimizer.learning_rate,
        max_length=recipe.max_length,
        seed=recipe.seed,
        dataset_kwargs={"skip_prepare_dataset": True},
        remove_unused_columns=False,
        # transformers' own would look for torch.xla; see recompute.py.
        gradient_checkpointing=False,
        # The frozen weights have the recipe's type and adapters are float32: nothing is left to autocast.
        bf16=False,
        use_cpu=setup.device.where.type == "cpu",
        logging_strategy="no",
        save_strategy="no",
        eval_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
