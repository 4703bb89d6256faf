"""How often the instructions of a program run: loops multiplied in.

Compilers note how often a loop runs where they know (`known_trip_count`), but lose the note when they rewrite loops, as
the TPU's does. Then the loop itself tells: `lax.scan` becomes one that counts up from a constant, by a constant, while
the count is less than a constant.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from portlab_jax.planner.hlo import Computation, Instruction, Module

# `call-start` hands collectives to the SparseCore, which runs them beside the rest.
CALLS = ("call", "call-start", "async-start", "conditional")

_SAME = ("copy", "bitcast", "convert", "copy-start", "copy-done", "opt-barrier")


@dataclass(frozen=True)
class Run:
    """A computation that runs, and for what.

    Attributes:
        computation: which runs.
        caller: the run of which it is a part; None for the entry.
        call: the loop or call in the caller; None for the entry.
        times: how often it runs.
    """

    computation: Computation
    caller: "Run | None" = None
    call: Instruction | None = None
    times: float = 1.0


def walk(module: Module) -> Iterator[tuple[Run, Instruction]]:
    """Every instruction that runs by itself, with the run of its computation.

    The insides of fusions are not visited. A loop whose number of rounds is not known counts once, and so does every
    branch of a conditional.
    """
    yield from _walk(module, Run(module.computations[module.entry]))


def _walk(module: Module, run: Run) -> Iterator[tuple[Run, Instruction]]:
    for instruction in run.computation.instructions.values():
        yield run, instruction
        if instruction.opcode == "while":
            known = rounds(module, run, instruction)
            body = module.computations[instruction.called_as("body")]
            yield from _walk(module, Run(body, run, instruction, run.times * (1 if known is None else known)))
        elif instruction.opcode in CALLS:
            for name in instruction.called:
                yield from _walk(module, Run(module.computations[name], run, instruction, run.times))


def rounds(module: Module, run: Run, loop: Instruction) -> int | None:
    """How often a loop of a computation runs; None if it depends on data."""
    if loop.trip_count is not None:
        return loop.trip_count
    condition = module.computations[loop.called_as("condition")]
    body = Run(module.computations[loop.called_as("body")], run, loop)
    compare = condition.root
    if compare.opcode != "compare" or "direction=LT" not in compare.attributes:
        return None
    counter = _element_of_state(condition, compare.operands[0])
    if counter is None:
        return None
    start, step = _element(run, loop.operands[0], counter), _step(body, counter)
    limit = _element_of_state(condition, compare.operands[1])
    if limit is None:
        end = _constant(Run(condition), compare.operands[1])
    else:
        end = _element(run, loop.operands[0], limit) if _is_handed_on(body, limit) else None
    if end is None or start is None or not step or step < 0:
        return None
    return max(-((start - end) // step), 0)


def _step(body: Run, counter: int) -> int | None:
    """By how much a round raises an element of the state."""
    instructions = body.computation.instructions
    if body.computation.root.opcode != "tuple":
        return None
    raised = instructions[_source(body.computation, body.computation.root.operands[counter])]
    if raised.opcode != "add":
        return None
    for number, other in (raised.operands, raised.operands[::-1]):
        if _element_of_state(body.computation, number) == counter:
            return _constant(body, other)
    return None


def _source(computation: Computation, name: str) -> str:
    """Where a value comes from within a computation, copies left out."""
    while (instruction := computation.instructions[name]).opcode in _SAME:
        name = instruction.operands[0]
    return name


def _element_of_state(computation: Computation, name: str) -> int | None:
    """Which element of a loop's state a value is; None if it is none."""
    instruction = computation.instructions[_source(computation, name)]
    if instruction.opcode != "get-tuple-element":
        return None
    source = computation.instructions[_source(computation, instruction.operands[0])]
    return _index(instruction) if source.opcode == "parameter" else None


def _index(instruction: Instruction) -> int:
    found = re.search(r"index=(\d+)", instruction.attributes)
    return int(found[1]) if found else 0


def _constant(run: Run | None, name: str) -> int | None:
    """The number that a value always is; None if it may be any."""
    if run is None:
        return None
    instruction = run.computation.instructions[_source(run.computation, name)]
    if instruction.opcode == "constant":
        return int(instruction.text) if re.fullmatch(r"-?\d+", instruction.text) else None
    if instruction.opcode == "get-tuple-element":
        return _element(run, instruction.operands[0], _index(instruction))
    return None


def _element(run: Run | None, name: str, index: int) -> int | None:
    """An element of a tuple if it is always the same number, also where a loop hands it on from round to round."""
    if run is None:
        return None
    instruction = run.computation.instructions[_source(run.computation, name)]
    if instruction.opcode == "tuple":
        return _constant(run, instruction.operands[index])
    if instruction.opcode == "parameter" and run.call is not None:
        passed = run.call.opcode == "call" or _is_handed_on(run, index)
        return _element(run.caller, run.call.operands[int(instruction.text)], index) if passed else None
    return None


def _is_handed_on(run: Run, index: int) -> bool:
    """Whether a loop's body leaves an element of the state as it is."""
    root = run.computation.root
    return root.opcode == "tuple" and _element_of_state(run.computation, root.operands[index]) == index
