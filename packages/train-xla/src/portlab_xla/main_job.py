"""The main job on PyTorch: what `portlab_spec.run.job` does, with TRL's loop as its training."""

import logging
import warnings
from pathlib import Path

import transformers

from portlab_spec.recipe import Recipe
from portlab_spec.run.job import Backend, Say, run_job
from portlab_spec.run.outcome import Outcome
from portlab_xla.devices import Name
from portlab_xla.session import BACKEND, LIBRARIES, TRAINER, XlaSession
from portlab_xla.setup import set_up
from portlab_xla.support import require_supported


def run(recipe: Recipe, out: Path | None, name: Name, say: Say) -> Outcome:
    """Do the main job.

    Args:
        recipe: the run.
        out: run folder, or None for the default.
        name: of the device.
        say: prints one line for each stage.

    Raises:
        UserError: bad input, found before anything is written where that is possible.
        CheckFailed: the export does not verify.
        Preempted: asked to leave while training; the same command goes on.
    """
    quieten()
    require_supported(recipe)
    backend = Backend(
        BACKEND,
        TRAINER,
        LIBRARIES,
        lambda recipe, model, token_ids: XlaSession(set_up(recipe, model, token_ids, name)),
    )
    return run_job(recipe, out, backend, say)


def quieten() -> None:
    """Leave what libraries say about themselves out of the job's own lines, unless the user debugs."""
    if not logging.getLogger().isEnabledFor(logging.DEBUG):
        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        logging.getLogger("absl").setLevel(logging.ERROR)
        warnings.filterwarnings("ignore", module=r"(torch|torch_xla|transformers|trl|peft|accelerate)\b.*")
