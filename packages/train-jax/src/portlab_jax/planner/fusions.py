"""What a fusion reads of its operands, and which of them it updates in place; fusions within fusions are followed."""

from portlab_jax.planner.hlo import Computation, Instruction, Module

SLICES = ("dynamic-slice", "slice", "gather")


def bytes_read(module: Module, fused: Computation, number: int) -> int:
    """Bytes of an operand that a fusion reads: only slices, if slices are all it takes of it.

    Args:
        module: holds the computations of nested fusions.
        fused: the fusion's computation.
        number: of the operand.
    """
    parameter = fused.parameters[number]
    read, waiting = 0, [parameter]
    while waiting:
        here = waiting.pop()
        for user in fused.users[here.name]:
            target = user.operands[0] == here.name and here.name not in user.operands[1:]
            if user.opcode == "bitcast":
                waiting.append(user)
            elif user.opcode == "fusion":
                inner = module.computations[user.called[0]]
                taken = [i for i, operand in enumerate(user.operands) if operand == here.name]
                read += sum(bytes_read(module, inner, i) for i in taken)
            elif user.opcode in SLICES and target:
                read += user.array.bytes
            elif user.opcode == "dynamic-update-slice" and target:
                continue  # written in place
            else:
                return parameter.array.bytes
    return min(read, parameter.array.bytes)


def results(fused: Computation) -> list[Instruction]:
    """What a fused computation makes: its root, or the parts of it."""
    return [fused.instructions[n] for n in fused.root.operands] if fused.root.opcode == "tuple" else [fused.root]


def update(module: Module, fused: Computation, result: Instruction) -> tuple[int, int] | None:
    """How a result comes from writing a slice into an operand, which then happens in place.

    Returns:
        Bytes of the slice and the operand's number; None if the result is an array of its own.
    """
    written = _behind_bitcasts(fused, result)
    if written.opcode == "fusion":
        inner = module.computations[written.called[0]]
        found = update(module, inner, inner.root)
        if found is None:
            return None
        size, target = found[0], written.operands[found[1]]
    elif written.opcode == "dynamic-update-slice":
        size, target = fused.instructions[written.operands[1]].array.bytes, written.operands[0]
    else:
        return None
    source = _behind_bitcasts(fused, fused.instructions[target])
    return (size, int(source.text)) if source.opcode == "parameter" else None


def _behind_bitcasts(fused: Computation, instruction: Instruction) -> Instruction:
    while instruction.opcode in ("bitcast", "copy") and instruction.operands:
        instruction = fused.instructions[instruction.operands[0]]
    return instruction
