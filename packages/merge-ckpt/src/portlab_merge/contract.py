"""What a training run writes beside its adapter, and what is derived from it.

The trainer stores this as `custom_metadata` of every step; the format tag names its version. A leaf stacks
one kind of module over the layers: `a` is f32 (L, in, r) and `b` is f32 (L, r, out), and module i of the leaf
gets the update scaling_i * (a[i] @ b[i]).T in the (out, in) orientation of Hugging Face. Experts have an axis of their
own behind L, in the leaves, (L, E, in, r) and (L, E, r, out), as in the base, (E, out, in). Token rows are full values
that replace rows of the embedding.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from portlab_spec.errors import UserError
from portlab_spec.files import sha256_json
from portlab_spec.models.targets import ModulePattern, pattern_value, scaling

FORMAT = "portlab-lora/1"
HEX_SHA256 = r"^[0-9a-f]{64}$"


Rank = Annotated[int, Field(gt=0)]
Alpha = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class _Part(BaseModel):
    # Unknown keys are tolerated: the format tag, not the key set, says whether we understand the rest.
    model_config = ConfigDict(frozen=True, extra="ignore", protected_namespaces=())


class LeafModules(_Part):
    """The modules stacked along axis 0 of the leaves `lora/<target>/{a,b}`, in order."""

    target: str = Field(min_length=1)
    modules: tuple[str, ...] = Field(min_length=1)


class TokenRows(_Part):
    """The rows of an embedding that were trained: row i of the leaf replaces row `ids[i]` of `parameter`."""

    parameter: str = Field(pattern=r"\.weight$")
    ids: tuple[int, ...] = Field(min_length=1)


class Lora(_Part):
    """Hyperparameters of the adapter, in PEFT's terms."""

    rank: Rank
    alpha: Alpha
    use_rslora: bool
    scaling: Alpha
    dropout: float = 0.0
    targets: tuple[str, ...] = Field(min_length=1)
    rank_pattern: dict[ModulePattern, Rank] = {}
    alpha_pattern: dict[ModulePattern, Alpha] = {}
    leaves: tuple[LeafModules, ...] = Field(min_length=1)
    token_rows: TokenRows | None = None

    def rank_of(self, module: str) -> int:
        """Rank of a module: `rank_pattern`, or the common rank."""
        return pattern_value(self.rank_pattern, module, self.rank)

    def scaling_of(self, module: str) -> float:
        """Scaling of a module: alpha / rank, with rsLoRA alpha / sqrt(rank) (arXiv 2312.03732)."""
        alpha = pattern_value(self.alpha_pattern, module, self.alpha)
        return scaling(alpha, self.rank_of(module), self.use_rslora)


class Base(_Part):
    """The model that was fine-tuned."""

    id: str
    revision: str | None = None
    path: str = ""
    files_sha256: dict[str, str] = Field(min_length=1)


class Model(_Part):
    """Family of the model and digest of the bytes of its config.json."""

    family: str
    config_sha256: str = Field(pattern=HEX_SHA256)


class AdapterMetadata(_Part):
    """The whole of `custom_metadata`."""

    format: Literal["portlab-lora/1"]
    lora: Lora
    base: Base
    model: Model
    recipe: dict[str, Any] = {}
    versions: dict[str, Any] = {}
    leaf_sha256: dict[str, str]
    probe: dict[str, Any] | None = None


def parse_metadata(value: Any, where: str) -> AdapterMetadata:
    """Validate the `custom_metadata` of a step.

    Raises:
        UserError: there is none, its format is another, or a key is missing or wrong.
    """
    tag = value.get("format") if isinstance(value, dict) else None
    if tag != FORMAT:
        found = f"its format is {tag!r}" if tag else "it carries no adapter metadata (Tunix, for one, saves none)"
        raise UserError(
            f"cannot read this checkpoint: {found}",
            where=where,
            fix=f"Read today: {FORMAT}, as train-jax writes it; without alpha and base no merge can be right",
        )
    if value.get("lora_sha256") not in (None, sha256_json(value.get("lora"))):
        what = "adapter metadata is not what the trainer saved (sha256)"
        raise UserError(what, where=where, fix="Copy the step again")
    try:
        return AdapterMetadata.model_validate(value)
    except ValidationError as error:
        faults = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
        raise UserError(f"adapter metadata is broken: {faults}", where=where, fix="Save the step again") from None
