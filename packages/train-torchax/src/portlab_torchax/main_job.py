"""The main job on torchax."""

import logging
import os
import warnings
from collections.abc import Callable
from pathlib import Path

import jax
import transformers

from portlab_spec.assets import ModelFolder, cache_dir
from portlab_spec.recipe import Recipe
from portlab_spec.run.job import Backend, run_job
from portlab_spec.run.outcome import Outcome
from portlab_torchax import BACKEND, TRAINER
from portlab_torchax.session import LIBRARIES, TorchaxSession
from portlab_torchax.setup import set_up


def run(recipe: Recipe, out: Path | None, say: Callable[[str], None]) -> Outcome:
    """Do the main job; see `portlab_spec.run.job.run_job`."""
    quieten()
    use_compilation_cache()

    def open_session(recipe: Recipe, model: ModelFolder, token_ids: tuple[int, ...]) -> TorchaxSession:
        return TorchaxSession(set_up(recipe, model, token_ids))

    return run_job(recipe, out, Backend(BACKEND, TRAINER, LIBRARIES, open_session), say)


def use_compilation_cache() -> None:
    """Keep compiled programs between runs, unless the user has said where or that not."""
    if jax.config.jax_compilation_cache_dir is None and jax.config.jax_enable_compilation_cache:
        jax.config.update("jax_compilation_cache_dir", str(cache_dir() / "compiled"))


def quieten() -> None:
    """Leave what libraries say about themselves out of the job's own lines, unless the user debugs."""
    os.environ.setdefault("USE_TORCH_XLA", "0")
    if not logging.getLogger().isEnabledFor(logging.DEBUG):
        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        logging.getLogger("torchax").setLevel(logging.ERROR)
        warnings.filterwarnings("ignore", module=r"(torch|torchax|transformers|peft)\b.*")
