"""The evidence of one backend: `evidence.json` and `evidence.safetensors` in a folder.

Tensors and their names, the same for every backend. R rows of the first step, T columns, N probed tokens of all rows,
P probed tokens of the longest row, H query heads, K key heads, d head size, D width, V vocabulary, S supervised tokens
of the first step, k steps:

    ids, real, target          (R, T)   int32, bool, bool: tokens as the model was given them, which of them are no
                                        padding, which are to be predicted
    hidden.embedding           (N, D)   scaled embeddings, before the first layer
    hidden.layer.00 ...        (N, D)   after each layer
    hidden.final               (N, D)   after the last norm
    inner.00.query             (P, H, d)  normed, before RoPE; of the longest row alone, as are all `inner`
    inner.00.key, .value       (T', K, d) at all T' tokens of it; absent in layers that share those of another
    inner.00.attended          (P, H d)  what attention gives to the output projection
    logits                     (n, V)   at n of the positions that predict a supervised token
    log_likelihood             (S, 3)   of each supervised token t, in row order: at positions t-2, t-1 (right) and t
    loss, supervised           (k,)     of every step: the loss, and the number of tokens to be predicted
    grad_norm, learning_rate   (k,)     the norm is before clipping
    adapter.0.NAME ...         adapter at the start and after each step, under PEFT's names behind the text model's
                               prefix: `layers.0.self_attn.q_proj.lora_A.weight`
    gradient.1.NAME ...        gradient of each step

All but the first three are float32, whatever a backend computes in.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, ValidationError

from portlab_spec.errors import UserError
from portlab_spec.files import read_json, write_json
from portlab_spec.recipe import Recipe
from portlab_spec.safetensors_file import Writer, open_file

FILE, TENSORS = "evidence.json", "evidence.safetensors"
REQUIRED = (
    *("ids", "real", "target", "hidden.embedding", "hidden.final", "logits", "log_likelihood"),
    *("loss", "supervised", "grad_norm", "learning_rate"),
)


class About(BaseModel):
    """What is told of a backend beside its tensors.

    Attributes:
        backend: its name.
        dtype: that it computes in.
        versions: of its libraries.
        device: where it computed.
        recipe: of the work.
        model: folder of the base.
        rows: ids of the rows of the first step, in the order of `ids`, each with the digest of what was given.
        repeat: largest difference between final hidden states computed twice, relative to their root mean square;
            above rounding if something is drawn at random.
        generated: ids of each answer.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    schema_version: Literal[1] = 1
    backend: str
    dtype: Literal["float32", "bfloat16"]
    versions: dict[str, str | None]
    device: str
    recipe: Recipe
    model: Path
    rows: dict[str, str]
    repeat: float
    generated: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Evidence:
    """What one backend computed; see the module for the tensors."""

    about: About
    tensors: Mapping[str, np.ndarray]

    @property
    def steps(self) -> int:
        """Steps that were taken."""
        return len(self.tensors["loss"])

    def named(self, prefix: str) -> dict[str, np.ndarray]:
        """Tensors whose names begin so, by the rest of their names."""
        return {name.removeprefix(prefix): x for name, x in self.tensors.items() if name.startswith(prefix)}

    def save(self, folder: Path) -> None:
        """Write both files, the JSON last: without it the folder holds no evidence.

        Raises:
            UserError: a tensor is missing, or is not a number.
        """
        require_complete(self.tensors, str(folder))
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {name: np.ascontiguousarray(_stored(x)) for name, x in sorted(self.tensors.items())}
        with Writer(folder / TENSORS, {name: (x.dtype, x.shape) for name, x in tensors.items()}) as writer:
            for name, x in tensors.items():
                writer.write(name, x)
        write_json(folder / FILE, self.about.model_dump(mode="json"))

    @staticmethod
    def load(folder: Path) -> "Evidence":
        """Read both files.

        Raises:
            UserError: missing, damaged, or of another schema.
        """
        path = folder / FILE
        try:
            about = About.model_validate(read_json(path, "evidence of a backend"))
        except ValidationError as error:
            first: Any = error.errors()[0]
            raise UserError(
                f"is not the evidence of a backend ({first['msg']} at {first['loc']})",
                where=str(path),
                fix="Write it with the same version of Portlab",
            ) from None
        tensors = {name: view.numpy() for name, view in open_file(folder / TENSORS).items()}
        require_complete(tensors, str(folder))
        return Evidence(about, tensors)


def require_complete(tensors: Mapping[str, np.ndarray], where: str) -> None:
    """Refuse evidence that lacks something.

    Raises:
        UserError: names the tensor.
    """
    missing = [name for name in REQUIRED if name not in tensors]
    prefixes = ("hidden.layer.", "adapter.0.", "adapter.1.", "gradient.1.")
    missing += [f"{prefix}*" for prefix in prefixes if not any(name.startswith(prefix) for name in tensors)]
    if missing:
        raise UserError(
            f"the evidence lacks {', '.join(missing)}", where=where, fix="Let the backend run again, to its end"
        )


def _stored(x: np.ndarray) -> np.ndarray:
    if x.dtype == np.bool_:
        return x
    return x.astype(np.int32 if np.issubdtype(x.dtype, np.integer) else np.float32)
