"""What a compiled program computes and moves, with loops multiplied in.

The compiler's own `cost_analysis()` counts a loop's body once, whatever its number of rounds; a step whose layers run
as loops is off by their number. Here each instruction counts as often as it runs.

FLOPs are those of matrix products, 2 per multiplication and addition, wherever they stand: in a `dot`, in a
`convolution` (which is what a TPU makes of a dot), or in a kernel (`kernels`). Bytes are what instructions read
from and write to HBM: a fusion reads its operands and writes its result; of an operand that it only slices, the slice;
what lies in on-chip memory counts nothing. Caches and what the hardware fetches twice are not seen.
"""

import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from portlab_jax.planner.fusions import SLICES, bytes_read, goes_on, written
from portlab_jax.planner.hlo import HBM, Array, Computation, Instruction, Module
from portlab_jax.planner.kernels import kernel_flops
from portlab_jax.planner.loops import rounds, walk

COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "ragged-all-to-all", "collective-permute")

# These name or alias arrays, and move nothing.
FREE = (
    *("parameter", "constant", "iota", "tuple", "get-tuple-element", "bitcast", "opt-barrier", "add-dependency"),
    *("while", "conditional", "call", "async-start", "after-all", "domain"),
    *("partition-id", "replica-id", "get-dimension-size"),
)


@dataclass
class Costs:
    """Of one device, for one run of the program.

    Attributes:
        flops: of matrix products.
        bytes: to and from HBM.
        collectives: runs of each kind.
        sent: bytes that leave the device for others, by kind of collective.
        kernels: runs of custom kernels whose FLOPs are not known, by name.
        unknown_loops: loops whose rounds the compiler does not know; they count once.
    """

    flops: float = 0.0
    bytes: float = 0.0
    collectives: Counter[str] = field(default_factory=Counter)
    sent: Counter[str] = field(default_factory=Counter)
    kernels: Counter[str] = field(default_factory=Counter)
    unknown_loops: int = 0

    @property
    def sent_bytes(self) -> float:
        """Bytes that leave the device, all collectives together."""
        return float(sum(self.sent.values()))


def count(module: Module) -> Costs:
    """Count a program."""
    costs = Costs()
    for run, instruction in walk(module):
        computation, times = run.computation, run.times
        costs.bytes += times * hbm_bytes(module, computation, instruction)
        if instruction.opcode == "while" and rounds(module, run, instruction) is None:
            costs.unknown_loops += 1
        for inner_computation, inner in inside(module, computation, instruction):
            costs.flops += times * flops(inner_computation, inner)
            if (kind := collective(inner_computation, inner)) is not None:
                costs.collectives[kind] += int(times)
                costs.sent[kind] += int(times * sent_bytes(inner_computation, inner, module.partitions))
            if is_kernel(inner) and _kernel_flops(inner_computation, inner) is None:
                costs.kernels[inner.op_name or inner.name] += int(times)
    return costs


def inside(
    module: Module, computation: Computation, instruction: Instruction
) -> Iterable[tuple[Computation, Instruction]]:
    """An instruction, or those of a fusion, however deeply nested."""
    if instruction.opcode != "fusion":
        yield computation, instruction
        return
    for name in instruction.called:
        fused = module.computations[name]
        for inner in fused.instructions.values():
            yield from inside(module, fused, inner)


def flops(computation: Computation, instruction: Instruction) -> float:
    """FLOPs of one instruction if it is a matrix product or a kernel that states its own, else 0."""
    if instruction.opcode == "dot":
        left = computation.instructions[instruction.operands[0]].array
        contracted = math.prod(left.dims[i] for i in instruction.integers("lhs_contracting_dims"))
        return 2.0 * instruction.array.size * contracted
    if instruction.opcode == "convolution":
        return _convolution_flops(computation, instruction)
    if is_kernel(instruction):
        return _kernel_flops(computation, instruction) or 0.0
    return 0.0


def is_kernel(instruction: Instruction) -> bool:
    """Whether a custom call is a kernel of ours (Pallas), and no bookkeeping of the compiler."""
    return instruction.opcode == "custom-call" and 'custom_call_target="tpu_custom_call"' in instruction.attributes


def _kernel_flops(computation: Computation, instruction: Instruction) -> float | None:
    if (stated := stated_flops(instruction)) is not None:
        return stated
    operands = [computation.instructions[name] for name in instruction.operands if name in computation.instructions]
    return kernel_flops(instruction.op_name, [operand.array for operand in operands])


def stated_flops(instruction: Instruction) -> float | None:
    """FLOPs that a kernel declares; None if it declares none."""
    config = instruction.backend_config.get("custom_call_config") or {}
    estimate = config.get("cost_estimate") or {}
    return float(estimate["flops"]) if "flops" in estimate else None


def _convolution_flops(computation: Computation, instruction: Instruction) -> float:
    """As XLA's HloCostAnalysis::HandleConvolution: pairs of a kernel position and a real input position.

    A batched dot becomes a convolution over padded or dilated spatial dimensions, most of whose products are with
    padding and are never computed.
    """
    left, right = (computation.instructions[name].array for name in instruction.operands[:2])
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", instruction.attributes)
    if labels is None:
        return 0.0
    left_labels, right_labels, out_labels = labels.groups()
    out = instruction.array
    window = _window(instruction.attributes)
    pairs = 1
    for label in (c for c in left_labels if c.isdigit()):
        spatial = int(label)
        pairs *= _valid_pairs(
            left.dims[left_labels.index(label)],
            right.dims[right_labels.index(label)],
            out.dims[out_labels.index(label)],
            {name: values[spatial] for name, values in window.items() if spatial < len(values)},
        )
    groups = _integer(instruction.attributes, "feature_group_count")
    batch_groups = _integer(instruction.attributes, "batch_group_count")
    in_features = left.dims[left_labels.index("f")]
    out_features = right.dims[right_labels.index("o")]
    batch = left.dims[left_labels.index("b")]
    return 2.0 * (in_features // groups) * out_features * (batch // batch_groups) * pairs


def _integer(attributes: str, name: str) -> int:
    found = re.search(rf"\b{name}=(\d+)", attributes)
    return int(found[1]) if found else 1


def _window(attributes: str) -> dict[str, list[tuple[int, int]]]:
    """Fields of window={size=3x3 stride=1x1 pad=1_1x0_0 lhs_dilate=2x1 rhs_dilate=1x1 rhs_reversal=1x0}."""
    found = re.search(r"window=\{([^}]*)\}", attributes)
    window = {}
    for name, value in re.findall(r"(\w+)=(\S+)", found[1] if found else ""):
        parts = [part.split("_") for part in value.split("x")]
        window[name] = [(int(part[0]), int(part[-1])) for part in parts]
    return window


def _valid_pairs(in_size: int, kernel_size: int, out_size: int, window: dict[str, tuple[int, int]]) -> int:
    """Pairs (kernel position, output position) of one spatial dimension that meet an input element."""
    stride = window.get("stride", (1, 1))[0]
    low = window.get("pad", (0, 0))[0]
    base, dilation = window.get("lhs_dilate", (1, 1))[0], window.get("rhs_dilate", (1, 1))[0]
    if (stride, base, dilation, low) == (1, 1, 1, 0) and in_size == kernel_size + out_size - 1:
        return kernel_size * out_size
    pairs = 0
    reach = (in_size - 1) * base
    for kernel in range(kernel_size):
        offset = kernel * dilation - low
        # out * stride + offset must lie in [0, reach] and be a multiple of the base dilation.
        first = max(math.ceil(-offset / stride), 0)
        last = min((reach - offset) // stride, out_size - 1)
        if base == 1:
            pairs += max(last - first + 1, 0)
        else:
            pairs += sum((position * stride + offset) % base == 0 for position in range(first, last + 1))
    return pairs


def hbm_bytes(module: Module, computation: Computation, instruction: Instruction) -> int:
    """Bytes that one run of an instruction reads from and writes to HBM."""
    opcode = instruction.opcode
    if opcode in FREE or opcode.endswith(("-done", "-update")) or _is_bookkeeping(instruction):
        return 0
    operands = [computation.instructions.get(name) for name in instruction.operands]
    arrays = [operand.array if operand and operand.arrays else None for operand in operands]
    if opcode == "fusion":
        return _fusion_bytes(module, instruction, arrays)
    source = arrays[0] if arrays else None
    if opcode in SLICES:
        return _moved(instruction.array, source) + _on_hbm([instruction.array])
    if opcode == "dynamic-update-slice":
        return _on_hbm([arrays[1]]) + _moved(arrays[1], instruction.array)
    if opcode in ("slice-start", "dynamic-slice-start"):
        return sum(_moved(made, source) + _on_hbm([made]) for made in instruction.made)
    return _on_hbm(arrays) + _on_hbm(instruction.made)


def _is_bookkeeping(instruction: Instruction) -> bool:
    """Whether this gives memory a name: a buffer to be filled, or neighbouring arrays to be seen as one."""
    return "AllocateBuffer" in instruction.attributes or "ConcatBitcast" in instruction.attributes


def _on_hbm(arrays: Iterable[Array | None]) -> int:
    return sum(a.bytes for a in arrays if a is not None and a.space == HBM)


def _moved(part: Array | None, whole: Array | None) -> int:
    """Bytes of a part that is read from or written into an array, if that lies in HBM."""
    return part.bytes if part and whole and whole.space == HBM else 0


def _fusion_bytes(module: Module, instruction: Instruction, operands: Sequence[Array | None]) -> int:
    fused = module.computations[instruction.called[0]]
    total = 0
    for number, array in enumerate(operands):
        if array is not None and array.space == HBM and number in fused.parameters:
            total += bytes_read(module, fused, number)
    return total + sum(result.bytes for result in written(module, instruction) if result.array.space == HBM)


def collective(computation: Computation, instruction: Instruction) -> str | None:
    """Kind of a collective; None if it is none, or goes on with one that was counted where it started.

    What a TPU calls all-reduce-scatter stands in the text as a fusion of an all-reduce and a slice of its result.
    """
    kind = instruction.opcode.removesuffix("-start")
    if kind not in COLLECTIVES or goes_on(computation, instruction):
        return None
    users = computation.users[instruction.name]
    scattered = users and all(user.opcode == "dynamic-slice" and user.root for user in users)
    return "reduce-scatter" if kind == "all-reduce" and scattered else kind


def group_size(instruction: Instruction, partitions: int) -> int:
    """Devices that take part in one group of a collective, which HLO writes in three ways, or all if it names none."""
    attributes = instruction.attributes
    # Along axes of the mesh, or parts of axes: mesh['data'=2,'fsdp'=8] {'data','fsdp':(2)4}.
    if mesh := re.search(r"replica_groups=mesh\[([^\]]*)\][^{]*\{([^}]*)\}", attributes):
        sizes = dict(re.findall(r"'([^']+)'=(\d+)", mesh[1]))
        axes = re.findall(r"'([^']+)'(?::\(\d+\)(\d+))?", mesh[2])
        return math.prod(int(part or sizes[axis]) for axis, part in axes)
    if iota := re.search(r"replica_groups=\[(\d+),(\d+)\]<=", attributes):
        return int(iota[2])
    if listed := re.search(r"replica_groups=\{\{([\d,]*)\}", attributes):
        return listed[1].count(",") + 1
    return partitions


def sent_bytes(computation: Computation, instruction: Instruction, partitions: int) -> float:
    """Bytes that a device sends in one run of a collective, by the ring algorithms, which are optimal.

    all-gather and reduce-scatter of n bytes (the larger side) over k devices send n (k-1)/k, all-reduce both after
    each other, all-to-all keeps its own part, a permutation sends all.
    """
    kind = collective(computation, instruction)
    operands = [computation.instructions[n] for n in instruction.operands if n in computation.instructions]
    given = sum(a.bytes for operand in operands for a in operand.arrays)
    if kind == "collective-permute":
        return given
    devices = group_size(instruction, partitions)
    share = (devices - 1) / devices
    factors = {"all-gather": devices * share, "all-reduce": 2 * share}
    return given * factors.get(kind or "", share)
