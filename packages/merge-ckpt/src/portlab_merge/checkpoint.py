"""A checkpoint of whatever kind: find the step, recognise the trainer, read the adapter in normal form."""

from dataclasses import dataclass, replace
from pathlib import Path

from portlab_merge.adapter import Adapter
from portlab_merge.location import LocalPath, Location, open_location
from portlab_merge.orbax_store import open_item, read_arrays
from portlab_merge.sources import Given, Source, Tree
from portlab_merge.sources.gemma import GemmaSource
from portlab_merge.sources.maxtext import MaxTextSource
from portlab_merge.sources.peft import is_peft, read_peft
from portlab_merge.sources.portlab import PortlabSource
from portlab_merge.sources.tunix import TunixSource
from portlab_merge.steps import pick_step
from portlab_spec.errors import UserError

SOURCES: tuple[Source, ...] = (PortlabSource(), TunixSource(), GemmaSource(), MaxTextSource())


@dataclass(frozen=True)
class Checkpoint:
    """The adapter of one step.

    Attributes:
        folder: where it was read.
        step: its number, if it has one.
        skipped: newer steps that are incomplete, and why.
        adapter: what it holds.
    """

    folder: Location
    step: int | None
    skipped: tuple[str, ...]
    adapter: Adapter

    @property
    def title(self) -> str:
        """What to call it in a sentence."""
        return self.folder.name if self.step is None else f"step {self.step}"


def read_checkpoint(run: str | Path, wanted: str = "latest", given: Given | None = None) -> Checkpoint:
    """Read the adapter of a run.

    Args:
        run: run folder, its checkpoints folder, one step, or a PEFT folder; Orbax's on disk or gs://.
        wanted: "latest", a step number, or "best:" and a metric.
        given: what the checkpoint itself may not say.

    Raises:
        UserError: no such step, a kind of checkpoint that is not known, or alpha is missing.
    """
    given = given or Given()
    location = open_location(str(run))
    if isinstance(location, LocalPath) and is_peft(location.path):
        return _read_peft(location, wanted, given)
    step = pick_step(location, wanted)
    item = open_item(step.item)
    where = str(step.folder)
    source = next((s for s in SOURCES if s.recognises(tuple(item.stored), step.metadata)), None)
    if source is None:
        raise UserError(
            f"cannot read this checkpoint: none of its {len(item.stored)} leaves are LoRA matrices that we know",
            where=where,
            fix=f"Read today: {', '.join(s.name for s in SOURCES)}, and PEFT folders",
        )
    leaves, faults = read_arrays(item, source.wants)
    given = replace(given, where=where)
    return Checkpoint(step.folder, step.number, step.skipped, source.read(Tree(leaves, faults, step.metadata), given))


def _read_peft(folder: LocalPath, wanted: str, given: Given) -> Checkpoint:
    if wanted != "latest":
        raise UserError(f"--step {wanted} but a PEFT folder has no steps", where=str(folder), fix="Leave out --step")
    if given.alpha is not None or given.use_rslora:
        raise UserError("the adapter carries its own alpha", where=str(folder), fix="Leave out --alpha and --rslora")
    adapter = read_peft(folder.path, tied_embeddings=given.tied_embeddings)
    return Checkpoint(folder, None, (), adapter)
