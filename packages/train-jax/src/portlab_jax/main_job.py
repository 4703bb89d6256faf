"""The main job: what `portlab_spec.run.job` does, on one process or on several."""

from pathlib import Path

from portlab_jax import TRAINER, distributed
from portlab_jax.compiled import use_compilation_cache
from portlab_jax.session import JaxSession
from portlab_spec.recipe import Recipe
from portlab_spec.run.folder import DEFAULT_BACKEND
from portlab_spec.run.job import Backend, Say, run_job
from portlab_spec.run.outcome import Outcome

LIBRARIES = ("jax", "jaxlib", "optax", "orbax-checkpoint", "numpy", "tokenizers")


def run(recipe: Recipe, out: Path | None, say: Say) -> Outcome:
    """Do the main job.

    Args:
        recipe: the run.
        out: run folder, or None for the default.
        say: prints one line for each stage.

    Raises:
        UserError: bad input, found before anything is written where that is possible.
        CheckFailed: the export does not verify.
        Preempted: asked to leave while training; the same command goes on.
    """
    distributed.initialize()
    use_compilation_cache()
    distributed.check_same("recipe", recipe.model_dump_json())
    backend = Backend(DEFAULT_BACKEND, TRAINER, LIBRARIES, JaxSession.open, leads=distributed.is_main())
    return run_job(recipe, out, backend, say)
