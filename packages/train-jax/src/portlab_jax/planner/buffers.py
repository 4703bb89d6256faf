"""Which arrays fill a device's memory when it is fullest, and whose they are.

The schedule in the optimised text says when each array comes and when it is last used. Arrays that share memory by
construction (views, loop state, updates in place) are one buffer. This mirrors the compiler's buffer assignment
without its packing, so that the sum differs from the compiler's own figure, which remains the one to trust; the list
names what is worth looking at.
"""

from dataclasses import dataclass

from portlab_jax.planner.fusions import written
from portlab_jax.planner.hlo import HBM, Array, Computation, Instruction, Module

VIEWS = frozenset(["bitcast", "get-tuple-element", "tuple", "while", "opt-barrier", "add-dependency"])


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


@dataclass(frozen=True)
class Result:
    """What an instruction leaves in memory.

    Attributes:
        instruction: which leaves it.
        arrays: new ones in HBM.
        shared: operands in whose memory the others lie.
    """

    instruction: Instruction
    arrays: tuple[Array, ...]
    shared: tuple[str, ...]

    @property
    def bytes(self) -> int:
        """Of the new arrays, padded."""
        return sum(array.padded_bytes for array in self.arrays)

    def buffer(self, module: Module) -> Buffer:
        """To be shown, by its largest array."""
        largest = max(self.arrays, key=lambda array: array.padded_bytes)
        shape = f"{largest.dtype}[{','.join(map(str, largest.dims))}]"
        made_by = self.instruction
        return Buffer(self.bytes, shape, made_by.op_name or made_by.name, module.source(made_by))


def largest_buffers(module: Module, count: int = 12) -> tuple[list[Buffer], int]:
    """The largest temporary arrays at the fullest moment, and the sum of all of them in bytes."""
    live, total = _peak(module, module.computations[module.entry])
    ranked = sorted(live, key=lambda result: -result.bytes)[:count]
    return [result.buffer(module) for result in ranked], total


def _peak(module: Module, computation: Computation) -> tuple[list[Result], int]:
    """What is in memory when most is, loops' insides included, and its bytes."""
    results = [_result(module, instruction) for instruction in computation.instructions.values()]
    ending = _last_uses(computation, _owners(results))
    live: dict[str, Result] = {}
    held = 0
    best: tuple[list[Result], int] = ([], 0)
    for at, result in enumerate(results):
        inner = _inside(module, result.instruction)
        if held + inner[1] > best[1]:
            best = [*live.values(), *inner[0]], held + inner[1]
        if result.bytes:
            live[result.instruction.name] = result
            held += result.bytes
            if held > best[1]:
                best = [*live.values()], held
        for name in ending.get(at, ()):
            if gone := live.pop(name, None):
                held -= gone.bytes
    return best


def _inside(module: Module, instruction: Instruction) -> tuple[list[Result], int]:
    """The peak within a loop, a call or the largest branch; nothing in other instructions."""
    if instruction.opcode == "while":
        return _peak(module, module.computations[instruction.called_as("body")])
    if instruction.opcode in ("call", "conditional"):
        return max((_peak(module, module.computations[n]) for n in instruction.called), key=lambda peak: peak[1])
    return [], 0


def _last_uses(computation: Computation, owners: dict[str, set[str]]) -> dict[int, list[str]]:
    """By position in the schedule, whose memory is used there for the last time; the result's is used for ever."""
    last: dict[str, int] = {}
    for at, instruction in enumerate(computation.instructions.values()):
        for name in (instruction.name, *instruction.operands):
            last.update(dict.fromkeys(owners.get(name, ()), at))
    last.update(dict.fromkeys(owners[computation.root.name], len(computation.instructions)))
    ending: dict[int, list[str]] = {}
    for name, at in last.items():
        ending.setdefault(at, []).append(name)
    return ending


def _owners(results: list[Result]) -> dict[str, set[str]]:
    """For each instruction, those that made the memory in which its result lies."""
    owners: dict[str, set[str]] = {}
    for result in results:
        name = result.instruction.name
        found = {owner for operand in result.shared for owner in owners.get(operand, ())}
        owners[name] = found | {name} if result.arrays or not found else found
    return owners


def _result(module: Module, instruction: Instruction) -> Result:
    arrays, shared = instruction.made, instruction.operands
    if instruction.opcode in ("parameter", "constant"):
        return Result(instruction, (), ())
    if instruction.opcode in VIEWS or instruction.opcode.endswith(("-done", "async-update")):
        return Result(instruction, (), shared)
    if "ConcatBitcast" in instruction.attributes:
        return Result(instruction, (), shared)
    if instruction.opcode == "dynamic-update-slice":
        return Result(instruction, (), shared[:1])
    if instruction.opcode == "call-update":
        return Result(instruction, tuple(array for array in arrays if array.space == HBM), shared)
    shared = ()
    if instruction.opcode == "fusion":
        made = written(module, instruction)
        arrays = tuple(part.array for part in made if part.operand is None)
        shared = tuple(instruction.operands[part.operand] for part in made if part.operand is not None)
    elif instruction.opcode == "call" and (shared := _passed_operands(module, instruction)):
        arrays = ()
    return Result(instruction, tuple(array for array in arrays if array.space == HBM), shared)


def _passed_operands(module: Module, instruction: Instruction) -> tuple[str, ...]:
    """Operands whose memory a call returns; none if it returns an array of its own."""
    callee = module.computations[instruction.called[0]]
    owners = _owners([_result(module, inner) for inner in callee.instructions.values()])[callee.root.name]
    returned = [callee.instructions[owner] for owner in owners]
    if any(owner.opcode != "parameter" for owner in returned):
        return ()
    return tuple(instruction.operands[int(owner.text)] for owner in returned)
