"""Which arrays fill a device's memory when it is fullest, and whose they are.

The schedule in the optimised text says when each array comes and when it is last used. Arrays that share memory by
construction (views, loop state, updates in place) are one buffer. This mirrors the compiler's buffer assignment
without its packing, so that the sum differs from the compiler's own figure, which remains the one to trust; the list
names what is worth looking at.
"""

from dataclasses import dataclass

from portlab_jax.planner.hlo import HBM, Array, Computation, Instruction, Module

ALIASES = frozenset(
    ["bitcast", "get-tuple-element", "tuple", "while", "opt-barrier", "add-dependency", "optimization-barrier"]
)


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
    arrays = instruction.arrays[:1] if instruction.opcode == "copy-start" else instruction.arrays
    return [a for a in arrays if a.space == HBM]


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
        if owners.get(instruction.name) == {instruction.name} and _allocates(instruction):
            live[instruction.name] = instruction
            held += _bytes(instruction)
        inner: tuple[list[Instruction], int] = ([], 0)
        if instruction.opcode == "while":
            inner = _peak(module, module.computations[instruction.called_as("body")])
        elif instruction.opcode in ("call", "conditional"):
            inner = max((_peak(module, module.computations[n]) for n in instruction.called), key=lambda p: p[1])
        if held + inner[1] > best[1]:
            best = [*live.values(), *inner[0]], held + inner[1]
        for name in ending.get(at, ()):
            if gone := live.pop(name, None):
                held -= _bytes(gone)
    return best


def _allocates(instruction: Instruction) -> bool:
    return instruction.opcode not in ("parameter", "constant", "call", "conditional") and _bytes(instruction) > 0


def _owners(module: Module, computation: Computation) -> dict[str, set[str]]:
    """For each instruction, those whose memory its result lies in."""
    owners: dict[str, set[str]] = {}
    for instruction in computation.instructions.values():
        source: tuple[str, ...] = ()
        if instruction.opcode in ALIASES or instruction.opcode.endswith("-done"):
            source = instruction.operands
        elif _updates_in_place(module, instruction):
            source = instruction.operands[:1]
        found = {owner for operand in source for owner in owners.get(operand, ())}
        owners[instruction.name] = found or {instruction.name}
    return owners


def _updates_in_place(module: Module, instruction: Instruction) -> bool:
    if instruction.opcode == "dynamic-update-slice":
        return True
    if instruction.opcode != "fusion" or not instruction.called:
        return False
    return module.computations[instruction.called[0]].root.opcode == "dynamic-update-slice"
