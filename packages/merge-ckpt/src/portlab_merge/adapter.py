"""The normal form of an adapter: what every kind of checkpoint is read into.

Trainers keep their factors stacked, split into heads, or as einsum weights. Here an update is always the two matrices
of one tensor of the base in Hugging Face's orientation (out, in), and planning, merging, export and verification know
nothing else.
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass(frozen=True)
class LoraSettings:
    """Hyperparameters of an adapter, in PEFT's terms."""

    rank: int
    alpha: float
    use_rslora: bool = False
    dropout: float = 0.0
    rank_pattern: Mapping[str, int] = field(default_factory=dict)
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class ModuleUpdate:
    """One tensor of the base gets W + scaling * (a @ b).T; experts are E such matrices in one tensor (E, out, in).

    Attributes:
        module: dotted path in transformers' terms, under any of the known prefixes; for experts the parameter itself.
        leaf: where the factors are stored, for people.
        a: f32 (in, r), or (E, in, r).
        b: f32 (r, out), or (E, r, out).
        scaling: factor on the product.
    """

    module: str
    leaf: str
    a: np.ndarray
    b: np.ndarray
    scaling: float

    @property
    def rank(self) -> int:
        """Inner dimension of the product."""
        return self.a.shape[-1]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the tensor that it fits: (out, in), or (E, out, in)."""
        return (*self.a.shape[:-2], self.b.shape[-1], self.a.shape[-2])


@dataclass(frozen=True)
class TokenRows:
    """Rows of an embedding that were trained: row i of `values`, f32 (n, D), replaces row `ids[i]` of `parameter`."""

    parameter: str
    ids: tuple[int, ...]
    values: np.ndarray


@dataclass(frozen=True)
class BaseRecord:
    """What a checkpoint says about the model it was trained on; whatever it does not say cannot be checked."""

    id: str = ""
    revision: str | None = None
    path: str = ""
    files_sha256: Mapping[str, str] = field(default_factory=dict)
    config_sha256: str | None = None


@dataclass(frozen=True)
class Adapter:
    """All that was trained, of one step.

    Attributes:
        origin: format it was read from: "portlab-lora/1", "tunix", "maxtext", "gemma" or "peft".
        lora: hyperparameters.
        updates: one for each adapted tensor.
        rows: trained rows of the embedding.
        base: the model it was trained on, as far as the checkpoint says.
        leaf_sha256: hex digest of each leaf, by its name in the checkpoint.
        problems: why this must not be used, one line each: leaves unreadable, unused, damaged.
        record: the rest of the trainer's metadata: recipe, versions, probe.
    """

    origin: str
    lora: LoraSettings
    updates: tuple[ModuleUpdate, ...]
    rows: TokenRows | None = None
    base: BaseRecord = BaseRecord()
    leaf_sha256: Mapping[str, str] = field(default_factory=dict)
    problems: tuple[str, ...] = ()
    record: Mapping[str, Any] = field(default_factory=dict)

    @property
    def digest(self) -> str:
        """Hex sha256 that names the adapter: of the sorted lines "<leaf> <sha256>"."""
        lines = [f"{name} {digest}\n" for name, digest in sorted(self.leaf_sha256.items())]
        return hashlib.sha256("".join(lines).encode()).hexdigest()


def leaf_digest(array: np.ndarray) -> str:
    """Hex sha256 of a leaf's values, little-endian in C order."""
    return hashlib.sha256(np.ascontiguousarray(array).astype(array.dtype.newbyteorder("<"), copy=False)).hexdigest()


def check_trained(factors: Iterable[tuple[str, np.ndarray]]) -> Iterator[str]:
    """One line for each kind of module in which no layer has left its initialisation, B = 0.

    Args:
        factors: kind of module and B of each layer.
    """
    trained: dict[str, bool] = {}
    for module, b in factors:
        trained[module] = trained.get(module, False) or bool(b.any())
    for module, moved in trained.items():
        if not moved:
            yield f"lora_b of {module} is all zero: the adapter is still at its initialisation"


def check_values(leaves: Mapping[str, np.ndarray]) -> Iterator[str]:
    """One line for each leaf that holds something other than finite floating-point numbers."""
    for name, array in leaves.items():
        if not np.issubdtype(array.dtype, np.floating) and array.dtype.name != "bfloat16":
            yield f"leaf {name} is {array.dtype}, expected floating point"
        elif bad := array.size - int(np.isfinite(array.astype(np.float32, copy=False)).sum()):
            yield f"leaf {name} holds {bad} values that are not finite"
