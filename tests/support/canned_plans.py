"""Compiled programs, analytic candidates and a compiler that is none: planning is tested without compiling."""

from portlab_jax.planner.analytic import Analytic
from portlab_jax.planner.buffers import Buffer
from portlab_jax.planner.program import Program, ProgramMemory
from portlab_jax.planner.records import Result
from portlab_jax.planner.search import Candidate

GIB = 2**30


def canned_program(**changes):
    """A program of 1e12 FLOPs and 1e9 bytes that needs 8 GiB; with `memory=None`, one that does not fit."""
    figures = {
        "memory": ProgramMemory(5 * GIB, 2 * GIB, GIB // 2, GIB // 2, 8 * GIB),
        "needed": 8 * GIB,
        "limit": None,
        "flops": 1e12,
        "bytes": 1e9,
        "compiler_flops": 1e11,
        "collectives": {},
        "sent": {},
        "kernels": {},
        "unknown_loops": 0,
        "largest": (Buffer(GIB, "bf16[8,65536,1024]", "jit(step)/dot_general", "model.py:120"),),
        "lower_seconds": 1.0,
        "compile_seconds": 9.0,
        "peak_rss_bytes": 3 * GIB,
    }
    return Program(**figures | changes)


TOO_LARGE = {"memory": None, "needed": 20 * GIB, "limit": 15 * GIB}


def canned_result(*programs, mesh=(1, 8, 1)):
    """What the compiling process answers for a training step of these shapes, ten steps each."""
    shape = {"steps": 10, "positions": 4096, "slots": 512, "attention": {"sliding": "splash", "full": "splash"}}
    return Result(
        programs={
            "mesh": dict(zip(("data", "fsdp", "tp"), mesh, strict=True)),
            "arguments": {"weights": 4 * GIB, "trained": GIB // 4, "optimizer": GIB // 2, "batch": GIB // 4},
            "rows": 32,
            "tokens": 4000.0,
            "shapes": [shape | {"program": program.to_json()} for program in programs],
        },
        source="150 rows of example",
        compiled=len(programs),
        versions={"jax": "0.12.0.1", "libtpu": "0.0.50.1"},
    )


def canned_candidate(changes, seconds=1.0, memory=GIB):
    """A setting by the analytic model."""
    return Candidate(dict(changes), seconds, memory, Analytic({"linear": 1.0}, {"weights": memory}, 1.0, 0.0))


class CannedCompiler:
    """Takes the place of `compile_job` and remembers what it was asked.

    Args:
        program: of a recipe, given as JSON.
        candidate: of changes to the recipe; None for those that training would refuse.
    """

    def __init__(self, program, candidate=None):
        self.program, self.candidate = program, candidate
        self.compiled, self.ranked = [], []

    def __call__(self, job):
        if job.kind == "rank":
            self.ranked.append(job)
            found = [c for c in map(self.candidate, job.variants) if c is not None]
            return Result(candidates=[c.to_json() for c in sorted(found, key=lambda c: c.seconds)])
        self.compiled.append(job.recipe)
        mesh = job.recipe["mesh"]
        return canned_result(self.program(job.recipe), mesh=tuple(mesh.values()) if mesh["data"] else (1, 8, 1))

    def install(self, monkeypatch):
        """Put it where the planner looks for its compiler."""
        for module in ("plan", "runs"):
            monkeypatch.setattr(f"portlab_jax.planner.{module}.compile_job", self)
        return self
