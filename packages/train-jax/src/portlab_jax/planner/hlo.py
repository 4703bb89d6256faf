"""Optimised HLO text, read: computations, instructions, array types, loops.

Only what counting needs is kept. The grammar is XLA's (`xla/hlo/parser/hlo_lexer.cc` and `HloInstruction::ToString`);
the printed form of one instruction is

    [ROOT] %name = TYPE opcode(operands), attribute=value, ..., metadata={...}, backend_config={...}

with TYPE an array `bf16[8,128]{1,0:T(8,128)(2,1)S(1)}` or a tuple of types. `S(n)` in a layout names a memory space:
0, left out, is the device's main memory (HBM); the others lie on the chip (TPU: 1 is VMEM, 5 the host).
"""

import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

BITS = {"pred": 8, "token": 0, "opaque": 0, "tuple": 0}
HBM, HOST = 0, 5

_ARRAY = re.compile(r"([a-z][a-z0-9]*)\[([\d,<=\s]*)\](?:\{([^{}]*)\})?")
_REFERENCE = re.compile(r"%([\w.\-]+)")
_SPACE = re.compile(r"S\((\d+)\)")
_TILE = re.compile(r"T\(([\d,*]+)\)")
_LINE = re.compile(r"^\s*(ROOT )?%?([\w.\-]+) = ")
_END = re.compile(r"\}(, execution_thread=.*)?")
_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\) -> .*\{$")
# The branches of a conditional are branch_computations, or true_computation and false_computation.
_CALLED = re.compile(r"\b(?:calls|to_apply|body|condition|\w+_computations?)=(\{[^}]*\}|%[\w.\-]+)")


@dataclass(frozen=True)
class Array:
    """One array of an instruction's result.

    Attributes:
        dtype: as XLA writes it.
        dims: its shape.
        space: memory space; 0 is HBM.
        minor_to_major: order of the dimensions in memory.
        tile: of the minor dimensions, which are padded to multiples of it; empty without one.
    """

    dtype: str
    dims: tuple[int, ...]
    space: int = HBM
    minor_to_major: tuple[int, ...] = ()
    tile: tuple[int, ...] = ()

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.dims)

    @cached_property
    def bytes(self) -> int:
        """Size of the elements."""
        return self.size * bits(self.dtype) // 8

    @cached_property
    def padded_bytes(self) -> int:
        """Size in memory: the minor dimensions are filled up to whole tiles."""
        dims = [self.dims[i] for i in self.minor_to_major] if self.minor_to_major else list(reversed(self.dims))
        for i, tile in enumerate(reversed(self.tile)):
            if i < len(dims):
                dims[i] = -(-dims[i] // tile) * tile
        return math.prod(dims) * bits(self.dtype) // 8


def bits(dtype: str) -> int:
    """Bits of one element; the digits of an XLA type name say so (bf16, s4, f8e4m3fn)."""
    if dtype in BITS:
        return BITS[dtype]
    digits = re.match(r"[a-z]+(\d+)", dtype)
    return int(digits[1]) if digits else 0


@dataclass(frozen=True)
class Instruction:
    """One instruction.

    Attributes:
        name: unique in its module.
        opcode: such as "fusion".
        arrays: of its result, tuples flattened.
        operands: names of instructions.
        text: of the operands; a parameter's number.
        attributes: the rest of the line.
        root: whether it is its computation's result.
    """

    name: str
    opcode: str
    arrays: tuple[Array, ...]
    operands: tuple[str, ...]
    text: str
    attributes: str
    root: bool

    @property
    def array(self) -> Array:
        """The first array of its result."""
        return self.arrays[0]

    @property
    def made(self) -> tuple[Array, ...]:
        """The arrays that it makes: a `-start` also names its operands, which it aliases, and a context."""
        if self.opcode == "copy-start":
            return self.arrays[:1]
        if self.opcode == "call-update":  # gives a started call its operands
            return self.arrays[len(self.operands) - 1 :]
        if not self.opcode.endswith("-start") or len(self.arrays) <= len(self.operands):
            return self.arrays
        return tuple(a for a in self.arrays[len(self.operands) :] if a.dims)

    @cached_property
    def called(self) -> tuple[str, ...]:
        """Computations that it calls, by name."""
        return tuple(name for group in _CALLED.findall(self.attributes) for name in _REFERENCE.findall(group))

    @property
    def aliased_operands(self) -> dict[int, int]:
        """Results that lie in the memory of an operand, as output_to_operand_aliasing={{1}: (0, {})} says."""
        found = re.search(r"output_to_operand_aliasing=\{(.*?\))\}", self.attributes)
        pairs = re.findall(r"\{(\d*)\}: \((\d+),", found[1]) if found else []
        return {int(result or 0): int(operand) for result, operand in pairs}

    def called_as(self, role: str) -> str:
        """The computation in one role, such as "body"."""
        found = re.search(rf"{role}=%?([\w.\-]+)", self.attributes)
        return found[1] if found else ""

    @property
    def op_name(self) -> str:
        """Where JAX put it: names of transformations and primitives."""
        found = re.search(r'op_name="([^"]*)"', self.attributes)
        return found[1] if found else ""

    def integers(self, attribute: str) -> tuple[int, ...]:
        """The numbers of an attribute such as lhs_contracting_dims={1,2}."""
        found = re.search(rf"\b{attribute}={{([\d,\s]*)}}", self.attributes)
        return tuple(int(n) for n in found[1].split(",") if n.strip()) if found else ()

    @cached_property
    def backend_config(self) -> dict[str, Any]:
        """What the backend noted down; empty if that is not JSON."""
        at = self.attributes.find("backend_config=")
        if at < 0:
            return {}
        text = self.attributes[at + len("backend_config=") :]
        try:
            value = json.JSONDecoder().raw_decode(text)[0]
            if isinstance(value, str):
                value = json.loads(value)
        except json.JSONDecodeError:
            return {}
        return value if isinstance(value, dict) else {}

    @property
    def trip_count(self) -> int | None:
        """How often a loop runs, if the compiler notes it; `loops.rounds` looks further."""
        known = self.backend_config.get("known_trip_count") or {}
        return int(known["n"]) if "n" in known else None


@dataclass
class Computation:
    """A list of instructions in the order in which they run.

    Attributes:
        name: unique in its module.
        instructions: by name.
    """

    name: str
    instructions: dict[str, Instruction] = field(default_factory=dict)

    @property
    def root(self) -> Instruction:
        """The instruction whose result is the computation's."""
        last = next(reversed(self.instructions.values()))
        return next((i for i in self.instructions.values() if i.root), last)

    @cached_property
    def parameters(self) -> dict[int, Instruction]:
        """Parameters by number."""
        return {int(i.text): i for i in self.instructions.values() if i.opcode == "parameter"}

    @cached_property
    def users(self) -> dict[str, list[Instruction]]:
        """Who takes each instruction's result, within the computation."""
        users: dict[str, list[Instruction]] = {name: [] for name in self.instructions}
        for instruction in self.instructions.values():
            for operand in dict.fromkeys(instruction.operands):
                if operand in users:
                    users[operand].append(instruction)
        return users


@dataclass
class Module:
    """A program.

    Attributes:
        computations: by name.
        entry: name of the one that runs.
        partitions: devices that run it together.
        sources: lines of source code by their number in `metadata`, "file:line".
    """

    computations: dict[str, Computation]
    entry: str
    partitions: int = 1
    sources: dict[int, str] = field(default_factory=dict)

    def source(self, instruction: Instruction) -> str:
        """The line of source code that an instruction comes from, "" if it is not known."""
        found = re.search(r'source_file="([^"]*)"(?: source_line=(\d+))?', instruction.attributes)
        if found:
            return _within_package(f"{found[1]}:{found[2]}" if found[2] else found[1])
        frame = re.search(r"stack_frame_id=(\d+)", instruction.attributes)
        return _within_package(self.sources.get(int(frame[1]), "")) if frame else ""


def parse(text: str) -> Module:
    """Read a module as `compiled.as_text()` prints it.

    Raises:
        ValueError: no entry computation.
    """
    computations: dict[str, Computation] = {}
    entry, current = "", None
    tables: dict[str, dict[int, str]] = {}
    table: dict[int, str] | None = None
    for line in _statements(text):
        if current is None:
            header = _HEADER.match(line)
            if header:
                current, table = Computation(header[2]), None
                computations[header[2]] = current
                if header[1]:
                    entry = header[2]
            elif re.fullmatch(r"FileNames|FunctionNames|FileLocations|StackFrames", line.strip()):
                table = tables.setdefault(line.strip(), {})
            elif table is not None and (row := re.match(r"^(\d+) (.*)$", line.strip())):
                table[int(row[1])] = row[2]
        elif _END.fullmatch(line):
            current = None
        elif instruction := _instruction(line):
            current.instructions[instruction.name] = instruction
    if not entry:
        raise ValueError("the text holds no entry computation of HLO")
    partitions = re.search(r"num_partitions=(\d+)", text[:100_000])
    return Module(computations, entry, int(partitions[1]) if partitions else 1, _sources(tables))


def _statements(text: str) -> Iterator[str]:
    """Lines, with those of one instruction joined: attributes such as a kernel's metadata hold line breaks."""
    held: list[str] = []
    for line in text.splitlines():
        begins = _LINE.match(line) is not None
        if held and not begins and not _END.fullmatch(line):
            held.append(line)
            continue
        if held:
            yield "\n".join(held)
        held = [line] if begins else []
        if not begins:
            yield line


def _instruction(line: str) -> Instruction | None:
    head = _LINE.match(line)
    if head is None:
        return None
    rest = line[head.end() :]
    end = _closing(rest) + 1 if rest.startswith("(") else rest.index(" ")
    kind, rest = rest[:end], rest[end:].lstrip()
    opening = rest.index("(")
    closing = opening + _closing(rest[opening:])
    operands, attributes = rest[opening + 1 : closing], rest[closing + 1 :]
    return Instruction(
        name=head[2],
        opcode=rest[:opening],
        arrays=tuple(map(_array, _ARRAY.finditer(kind))),
        operands=tuple(_REFERENCE.findall(operands)),
        text=operands,
        attributes=attributes,
        root=bool(head[1]),
    )


def _closing(text: str) -> int:
    """Index of the parenthesis that closes the one at the start; quoted text is skipped."""
    depth, quoted, escaped = 0, False, False
    for i, char in enumerate(text):
        if quoted:
            quoted = char != '"' or escaped
            escaped = char == "\\" and not escaped
        elif char == '"':
            quoted = True
        elif char == "(":
            depth += 1
        elif char == ")":
            depth -= 1
            if depth == 0:
                return i
    raise ValueError(f"a parenthesis is not closed: {text[:80]}")


def _array(match: re.Match[str]) -> Array:
    dtype, dims, layout = match.groups()
    shape = tuple(int(d.replace("<=", "")) for d in dims.split(",") if d.strip())
    order, _, properties = (layout or "").partition(":")
    space, tile = _SPACE.search(properties), _TILE.search(properties)
    return Array(
        dtype,
        shape,
        int(space[1]) if space else HBM,
        tuple(int(i) for i in order.split(",") if i),
        tuple(1 if t == "*" else int(t) for t in tile[1].split(",")) if tile else (),
    )


def _within_package(source: str) -> str:
    """A source line without the folder that its package is installed in."""
    return re.sub(r"^.*/(?:site-packages|src)/", "", source)


def _sources(tables: dict[str, dict[int, str]]) -> dict[int, str]:
    """Innermost "file:line" of each stack frame, from the tables in front of a module's computations."""

    def fields(row: str) -> dict[str, int]:
        return {key: int(value) for key, value in re.findall(r"(\w+)=(\d+)", row)}

    files = {i: name.strip('"') for i, name in tables.get("FileNames", {}).items()}
    locations = {i: fields(row) for i, row in tables.get("FileLocations", {}).items()}
    sources = {}
    for i, row in tables.get("StackFrames", {}).items():
        location = locations.get(fields(row).get("file_location_id", 0), {})
        file = files.get(location.get("file_name_id", 0), "")
        if file:
            sources[i] = f"{file}:{location.get('line', 0)}"
    return sources
