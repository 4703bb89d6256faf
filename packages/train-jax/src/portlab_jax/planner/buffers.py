"""Which arrays fill a device's memory when it is fullest, and whose they are.

The schedule in the optimised text says when each array comes and when it is last used. Arrays that share memory by
construction (views, loop state, updates in place) are one buffer. This mirrors the compiler's buffer assignment
without its packing, so that the sum differs from the compiler's own figure, which remains the one to trust; the list
names what is worth looking at.
"""

from dataclasses import dataclass

from portlab_jax.planner.fusions import results, update
from portlab_jax.planner.hlo import HBM, Array, Computation, Instruction, Module

ALIASES = frozenset(["bitcast", "get-tuple-element", "tuple", "while", "opt-barrier", "add-dependency"])
CALLS = frozenset(["call", "conditional"])


@dataclass(frozen=True)
class Buffer:
    """One array in memory at the fullest moment.

    Attributes:
        bytes: padded to tiles.
        shape: as XLA writes it.
        op: where JAX put the instruction that makes it.
        source: line of code, "" if unknown.
    """

    bytes: int
    shape: str
    op: str
    source: str


def largest_buffers(module: Module, count: int = 12) -> tuple[list[Buffer], int]:
    """The largest temporary arrays at the fullest moment, and the sum of all of them in bytes."""
    live, total = _peak(module, module.computations[module.entry])
    ranked = sorted(live, key=lambda i: -_bytes(i))[:count]
    return [Buffer(_bytes(i), _shape(i), i.op_name or i.name, module.source(i)) for i in ranked], total


def _bytes(instruction: Instruction) -> int:
    return sum(a.padded_bytes for a in _made(instruction))


def _made(instruction: Instruction) -> list[Array]:
    """The arrays that an instruction makes in HBM."""
    return [a for a in instruction.made if a.space == HBM]


def _shape(instruction: Instruction) -> str:
    largest = max(_made(instruction), key=lambda a: a.padded_bytes)
    return f"{largest.dtype}[{','.join(map(str, largest.dims))}]"


def _peak(module: Module, computation: Computation) -> tuple[list[Instruction], int]:
    """Instructions whose results are in memory when most is, loops' insides included, and their bytes."""
    owners = _owners(module, computation)
    order = list(computation.instructions.values())
    last: dict[str, int] = {}
    for at, instruction in enumerate(order):
        for operand in (instruction.name, *instruction.operands):
            for owner in owners.get(operand, ()):
                last[owner] = at
    for owner in owners.get(computation.root.name, ()):
        last[owner] = len(order)
    live: dict[str, Instruction] = {}
    held = 0
    best: tuple[list[Instruction], int] = ([], 0)
    ending: dict[int, list[str]] = {}
    for name, at in last.items():
        ending.setdefault(at, []).append(name)
    for at, instruction in enumerate(order):
        inner: tuple[list[Instruction], int] = ([], 0)
        if instruction.opcode == "while":
            inner = _peak(module, module.computations[instruction.called_as("body")])
        elif instruction.opcode in CALLS:
            inner = max((_peak(module, module.computations[n]) for n in instruction.called), key=lambda p: p[1])
        if held + inner[1] > best[1]:
            best = [*live.values(), *inner[0]], held + inner[1]
        if owners[instruction.name] == {instruction.name} and _allocates(instruction):
            live[instruction.name] = instruction
            held += _bytes(instruction)
            if held > best[1]:
                best = [*live.values()], held
        for name in ending.get(at, ()):
            if gone := live.pop(name, None):
                held -= _bytes(gone)
    return best


def _allocates(instruction: Instruction) -> bool:
    return instruction.opcode not in ("parameter", "constant") and _bytes(instruction) > 0


def _owners(module: Module, computation: Computation) -> dict[str, set[str]]:
    """For each instruction, those whose memory its result lies in."""
    owners: dict[str, set[str]] = {}
    for instruction in computation.instructions.values():
        source: tuple[str, ...] = ()
        if instruction.opcode in ALIASES or instruction.opcode.endswith(("-done", "-update")):
            source = instruction.operands
        elif instruction.opcode == "dynamic-update-slice":
            source = instruction.operands[:1]
        elif instruction.opcode == "fusion":
            source = _updated_operands(module, instruction)
        elif instruction.opcode == "call":
            source = _passed_operands(module, instruction)
        found = {owner for operand in source for owner in owners.get(operand, ())}
        owners[instruction.name] = found or {instruction.name}
    return owners


def _updated_operands(module: Module, instruction: Instruction) -> tuple[str, ...]:
    """Operands whose memory a fusion writes its results into; none if any of these is an array of its own."""
    fused = module.computations[instruction.called[0]]
    updates = [update(module, fused, result) for result in results(fused)]
    if None in updates:
        return ()
    return tuple(instruction.operands[found[1]] for found in updates if found)


def _passed_operands(module: Module, instruction: Instruction) -> tuple[str, ...]:
    """Operands whose memory a call returns; none if it returns an array of its own."""
    callee = module.computations[instruction.called[0]]
    returned = [callee.instructions[owner] for owner in _owners(module, callee)[callee.root.name]]
    if any(owner.opcode != "parameter" for owner in returned):
        return ()
    return tuple(instruction.operands[int(owner.text)] for owner in returned)
