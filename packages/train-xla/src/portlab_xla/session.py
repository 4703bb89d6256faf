"""A run as the job sees it: a model that answers, trains and is exported."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from portlab_hf.adapter_files import adapter_tensors
from portlab_hf.export import export_adapter, model_card, verify_adapter
from portlab_hf.model import module_prefix, trained_parameters
from portlab_spec.data.tokens import Row
from portlab_spec.mesh import replications
from portlab_spec.models import param_table
from portlab_spec.models.targets import describe
from portlab_spec.packing import BatchOrder
from portlab_spec.report import Evaluation, versions
from portlab_spec.run.data import RunRows
from portlab_spec.run.export import export_merged
from portlab_spec.run.job import Advance, Say, Trained
from portlab_spec.run.metadata import planned_metadata
from portlab_xla.checkpoint import Checkpoints
from portlab_xla.decode import Decoder
from portlab_xla.export import probe
from portlab_xla.setup import Setup, batch_line, dtype_of
from portlab_xla.steps import MonitoredLoss, train

BACKEND, TRAINER = "xla", "train-xla"
LIBRARIES = ("torch", "torch-xla", "transformers", "trl", "peft", "accelerate", "numpy", "tokenizers")


class XlaSession:
    """`portlab_spec.run.job.Session` of this trainer; the adapter is trained in place."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._metadata: dict[str, Any] = {}  # of the checkpoints, once it trains

    def introduce(self) -> list[str]:
        """What is trained and where, a line each."""
        setup, found = self._setup, self.device()
        device, config = setup.device, setup.config
        rows = f", {len(setup.token_ids)} token rows" if setup.token_ids else ""
        lines = [
            f"{config.family}, {config.num_hidden_layers} layers on {found['count']} {found['kind']} device(s), "
            f"{found['platform']}; training adapters of {describe(setup.leaves)}{rows}",
            batch_line(setup.recipe, device),
        ]
        if device.count > 1:
            lines += [f"mesh {found['mesh']}", *replications(param_table(config), device.shape)]
        if "unused" in found:
            lines.append(f"{found['unused']} is installed and not used: this stack trains through torch_xla")
        return lines

    def device(self) -> dict[str, Any]:
        """The devices of the run."""
        return self._setup.device.describe()

    def disk_needed(self) -> int:
        """Bytes of a run: the merged model, and the checkpoints that are kept, each an adapter and its two moments."""
        recipe = self._setup.recipe
        merged = sum(file.stat().st_size for file in self._setup.model.path.iterdir() if file.is_file())
        adapter = sum(p.numel() * p.element_size() for p in trained_parameters(self._setup.adapted).values())
        # The newest is written before the oldest goes; the adapter is also exported.
        return merged + (recipe.keep + recipe.keep_best + 2) * 3 * adapter

    def generate(self, prompts: Sequence[Sequence[int]], stop_ids: Sequence[int], advance: Advance) -> list[list[int]]:
        """Greedy continuation of each prompt."""
        return Decoder(self._setup, stop_ids, self._setup.recipe.max_new_tokens)(prompts, advance=advance)

    def loss(self, rows: Sequence[Row]) -> float:
        """Mean cross-entropy over the supervised tokens of rows."""
        return MonitoredLoss(self._setup, rows)()

    def train(self, rows: RunRows, order: BatchOrder, folder: Path, say: Say) -> Trained:
        """Train, from the newest checkpoint if there is one; see `portlab_xla.steps.train`."""
        setup, recipe = self._setup, self._setup.recipe
        self._metadata = describe_run(setup, order)
        checkpoints = Checkpoints(
            folder / "checkpoints",
            self._metadata,
            keep=recipe.keep,
            keep_best=recipe.keep_best,
            to_host=setup.device.to_host,
        )
        return train(setup, rows.train, rows.monitored, checkpoints, order, folder=folder, say=say)

    def export(self, rows: RunRows, after: Evaluation, folder: Path, say: Say) -> dict[str, str]:
        """Write the adapter and the merged model, and verify both.

        Raises:
            CheckFailed: what was written is not what was trained.
        """
        setup, base = self._setup, self._setup.model.path
        adapter, merged = folder / "adapter", folder / "merged"
        golden = probe(setup, rows.train[0])
        card = model_card(setup.recipe, setup.model.id, self.device(), after, versions(*LIBRARIES), trainer="TRL")
        tensors = adapter_tensors(setup.adapted, setup.device.to_host)
        export_adapter(setup.adapted, tensors, adapter, self._metadata, golden, card)
        worst = verify_adapter(base, adapter, golden, dtype_of(setup.recipe, setup.device))
        say(f"exported {adapter}: plain PEFT computes the same logits, largest difference {worst:.2g}")
        export_merged(base, adapter, merged)
        say(f"exported {merged}, verified against base and adapter")
        return {"adapter": str(adapter), "merged": str(merged)}


def describe_run(setup: Setup, order: BatchOrder) -> dict[str, Any]:
    """Metadata of every checkpoint of a run."""
    return planned_metadata(
        setup.recipe,
        setup.model,
        setup.config,
        setup.leaves,
        prefix=module_prefix(setup.base),
        token_ids=setup.token_ids,
        versions=versions(*LIBRARIES),
        data_digest=order.digest(),
    )
