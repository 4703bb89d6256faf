"""What a fusion reads of its operands, and what it writes; fusions within fusions are followed.

Nothing is read or written for

- operands of which a fusion takes slices: the slices count;
- results that are an operand with a slice written into it, which happens in place: the slice counts;
- collectives that run beside other work. A TPU repeats such a collective in every fusion of its chain: in the one that
  starts it, in those that go on with something else meanwhile, and in the one that waits for it. The first counts.
"""

from dataclasses import dataclass

from portlab_jax.planner.hlo import Array, Computation, Instruction, Module

SLICES = ("dynamic-slice", "slice", "gather")


def goes_on(fused: Computation, instruction: Instruction) -> bool:
    """Whether this is a collective of a chain that another fusion has started, or the end of the chain."""
    if "AsyncCollectiveDone" in instruction.attributes:
        return True
    return "chain_id=" in instruction.attributes and not _starts(fused)


def _starts(fused: Computation) -> bool:
    return any("AsyncCollectiveStart" in instruction.attributes for instruction in fused.instructions.values())


def bytes_read(module: Module, fused: Computation, number: int) -> int:
    """Bytes of an operand that a fusion reads.

    Args:
        module: holds the computations of nested fusions.
        fused: the fusion's computation.
        number: of the operand.
    """
    parameter = fused.parameters[number]
    whole = parameter.array.bytes
    read, waiting = 0, [parameter]
    while waiting:
        here = waiting.pop()
        if here.root:
            return whole
        for user in fused.users[here.name]:
            sliced = user.operands[0] == here.name and here.name not in user.operands[1:]
            if _viewed(module, user) == here.name:
                waiting.append(user)
            elif user.opcode == "fusion":
                inner = module.computations[user.called[0]]
                taken = [i for i, operand in enumerate(user.operands) if operand == here.name]
                read += sum(bytes_read(module, inner, i) for i in taken)
            elif user.opcode in SLICES and sliced:
                read += user.array.bytes
            elif not (goes_on(fused, user) or user.opcode == "tuple" or _targets(user, here)):
                return whole
    return min(read, whole)


def _targets(user: Instruction, operand: Instruction) -> bool:
    """Whether an operand is only written into."""
    return user.opcode == "dynamic-update-slice" and operand.name not in user.operands[1:]


def _viewed(module: Module, instruction: Instruction) -> str | None:
    """The operand of which an instruction in a fusion is but a view.

    Bitcasts are, copies (which only change the tiling on the way), and fusions that hold nothing else.
    """
    if instruction.opcode in ("bitcast", "copy"):
        return instruction.operands[0]
    if instruction.opcode != "fusion":
        return None
    inner = module.computations[instruction.called[0]]
    source = _behind_views(module, inner, inner.root)
    return instruction.operands[int(source.text)] if source.opcode == "parameter" else None


def _behind_views(module: Module, fused: Computation, instruction: Instruction) -> Instruction:
    while source := _viewed(module, instruction):
        instruction = fused.instructions[source]
    return instruction


@dataclass(frozen=True)
class Written:
    """One array that a fusion makes.

    Attributes:
        array: as its users see it.
        bytes: that are written.
        operand: number of the operand in whose memory it lies; None if it is an array of its own.
    """

    array: Array
    bytes: int
    operand: int | None


def written(module: Module, instruction: Instruction) -> list[Written]:
    """What a fusion makes, its tuple flattened."""
    fused = module.computations[instruction.called[0]]
    aliased = instruction.aliased_operands
    if fused.root.opcode != "tuple" and len(instruction.arrays) > 1:
        # The start of a chain is one custom call that yields its operand, the collective's result, and its state.
        return [Written(a, 0 if i in aliased else a.bytes, aliased.get(i)) for i, a in enumerate(instruction.arrays)]
    names = fused.root.operands if fused.root.opcode == "tuple" else (fused.root.name,)
    found = []
    for i, (name, array) in enumerate(zip(names, instruction.arrays, strict=False)):
        result = fused.instructions[name]
        if update := _update(module, fused, result):
            found.append(Written(array, *update))
        else:
            nothing = result.opcode == "parameter" or goes_on(fused, result)
            found.append(Written(array, 0 if nothing else array.bytes, aliased.get(i)))
    return found


def _update(module: Module, fused: Computation, result: Instruction) -> tuple[int, int] | None:
    """Bytes of the slice that is written into an operand to make a result, and the operand's number."""
    made = _behind_views(module, fused, result)
    if made.opcode == "fusion":
        inner = module.computations[made.called[0]]
        found = _update(module, inner, inner.root)
        if found is None:
            return None
        size, target = found[0], made.operands[found[1]]
    elif made.opcode == "dynamic-update-slice":
        size, target = fused.instructions[made.operands[1]].array.bytes, made.operands[0]
    else:
        return None
    source = _behind_views(module, fused, fused.instructions[target])
    return (size, int(source.text)) if source.opcode == "parameter" else None
