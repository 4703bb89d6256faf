"""Compile one job in a process of its own: `python -m portlab_jax.planner.worker JOB RESULT`.

The compiler takes gigabytes, which a process gives back only at its end, and may bring the process down. Compiled
programs are remembered by what they are made from: the text of the lowered program, the topology and the versions.
"""

import hashlib
import json
import os
import sys
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from portlab_jax.planner.records import Job, Result
from portlab_jax.planner.topology import prepare_environment
from portlab_spec.assets import cache_dir
from portlab_spec.errors import UserError
from portlab_spec.files import read_json, write_json
from portlab_spec.hardware import Slice, parse_slice
from portlab_spec.planning import find_trainer
from portlab_spec.recipe import Recipe

VERSIONS = ("jax", "jaxlib", "libtpu")
FORMAT = 5  # raise it whenever what is read off a program changes: remembered ones are then compiled again


class Remembered:
    """Compiles programs, or takes them from where they were remembered."""

    def __init__(self, part: Slice, folder: Path) -> None:
        self._part, self._folder = part, folder
        self.versions = {name: version(name) for name in VERSIONS}
        self.compiled = 0

    def __call__(self, function: Any, *args: Any) -> Any:
        """A `Program`."""
        from portlab_jax.planner.program import Program, compile_lowered, lower

        lowered, seconds = lower(function, *args)
        made_from = [FORMAT, self._part.compiler_topology, self.versions, lowered.as_text()]
        path = self._folder / f"{hashlib.sha256(json.dumps(made_from).encode()).hexdigest()[:32]}.json"
        if path.is_file():
            return Program.from_json(read_json(path, "compiled program"))
        program = compile_lowered(lowered, seconds)
        self.compiled += 1
        write_json(path, program.to_json())
        return program


def run(job: Job, folder: Path) -> Result:
    """Compile a job's programs.

    Raises:
        UserError: as training or decoding would refuse the recipe.
    """
    prepare_environment()
    from portlab_jax.planner import inference, search, topology, training, workload

    part = parse_slice(job.slice)
    recipe = Recipe.model_validate(job.recipe)
    compiler = Remembered(part, folder)
    devices = topology.devices(part)
    programs: Any
    if job.kind in ("train", "rank"):
        own = job.backend == "jax"
        work = workload.find_workload(recipe, length=job.length, supervised=job.supervised, gemma_only=own)
        source = work.source
        if job.kind == "rank":
            candidates = search.rank(recipe, work, part, devices, job.variants)
            return Result(candidates=[c.to_json() for c in candidates], source=source, versions=compiler.versions)
        if own:
            programs = training.compile_training(recipe, work, part, devices, compiler)
        else:
            draw = find_trainer(job.backend).load()
            programs = training.compile_offered(draw, recipe, work, part, devices, compiler)
    else:
        config = workload.find_config(recipe.model)
        step = inference.compile_prefill if job.kind == "prefill" else inference.compile_decode
        programs = step(recipe, config, part, devices, compiler, batch=job.batch, context=job.context)
        source = f"{job.batch} sequences of {job.context} tokens"
    found = asdict(programs)
    versions = compiler.versions | found.pop("versions", {})
    return Result(programs=found, source=source, compiled=compiler.compiled, versions=versions)


def main(job: Path, result: Path) -> None:
    """Run a job file and leave its result, which may be that it was refused."""
    try:
        outcome = run(Job(**read_json(job, "job")), cache_dir() / "plans")
    except UserError as error:
        outcome = Result(error=str(error))
    write_json(result, asdict(outcome))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
    # libtpu's threads may wait for what never comes; there is nothing left to do.
    sys.stdout.flush()
    os._exit(0)
