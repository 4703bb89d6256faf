"""Which implementation is right for the rows, shapes and device at hand."""

from dataclasses import dataclass
from typing import NamedTuple

from portlab_spec.errors import UserError


@dataclass(frozen=True)
class Kernel:
    """What a kernel takes; `segment`, `plain` and `tree` name the implementation for such rows.

    Rows are of one segment each, plain (segments side by side), or trees; each kind is a case of the next.
    """

    platform: str
    dtypes: tuple[str, ...]
    largest_head_dim: int
    head_dim_step: int
    row_step: int
    longest_masked_row: int
    segment: str
    plain: str
    tree: str


# Splash: tiles of 128 lanes; float16 is not a TPU type. A mask in memory takes twelve bytes per pair of tokens (three
# kernels read theirs as int32; compiled for v5e, 8192 tokens: 768 MiB), for one row at a time.
# cuDNN: `check_is_flash_attention` in jax/_src/cudnn/fused_attention_stablehlo.py of JAX 0.12. A mask becomes a bias of
# two bytes per pair of tokens, for all rows of a device at once.
KERNELS = {
    "splash": Kernel(
        platform="tpu",
        dtypes=("bfloat16", "float32"),
        largest_head_dim=512,
        head_dim_step=128,
        row_step=128,
        longest_masked_row=4096,
        segment="splash",
        plain="splash",
        tree="splash_tree",
    ),
    "cudnn": Kernel(
        platform="gpu",
        dtypes=("bfloat16", "float16"),
        largest_head_dim=256,
        head_dim_step=8,
        row_step=2,
        longest_masked_row=4096,
        segment="cudnn",
        plain="cudnn_mask",
        tree="cudnn_mask",
    ),
}
# Head sizes beyond 128 need Hopper.
CUDNN_SMALL_HEAD_DIM, CUDNN_LARGE_HEAD_CAPABILITY = 128, 9.0


class Choice(NamedTuple):
    """An implementation as `attend` names it, and why."""

    implementation: str
    reason: str


def choose(
    requested: str,
    *,
    platform: str,
    plain: bool,
    one_segment: bool,
    head_dim: int,
    dtype: str,
    row_length: int,
    compute_capability: float | None = None,
) -> Choice:
    """Choose for one kind of layer.

    Args:
        requested: auto, xla, splash or cudnn.
        platform: cpu, gpu or tpu.
        plain: no packed row shares a prefix between segments.
        one_segment: every packed row holds one segment.
        head_dim: size of a head.
        dtype: of queries, keys and values.
        row_length: tokens of a packed row.
        compute_capability: of the GPU, such as 9.0.

    Raises:
        UserError: what was requested would not compute this attention.
    """
    if requested == "xla":
        return Choice("xla", "requested")
    names = [name for name, kernel in KERNELS.items() if requested in ("auto", name)]
    refusals = []
    for name in names:
        kernel = KERNELS[name]
        implementation = kernel.segment if one_segment else kernel.plain if plain else kernel.tree
        masked = implementation.endswith(("_mask", "_tree"))
        refusal = _refusal(name, kernel, masked, platform, head_dim, dtype, row_length, compute_capability)
        if refusal is None:
            rows = "one segment per row" if one_segment else "plain rows" if plain else "rows of trees"
            return Choice(implementation, f"{rows} on {platform}")
        if requested == name:
            raise UserError(
                f"{name} cannot be used here: {refusal}", where="attention", fix="Set attention to auto or xla"
            )
        if kernel.platform == platform:
            refusals.append(f"{name} does not fit: {refusal}")
    return Choice("xla", "; ".join(refusals) or f"no kernel for {platform}")


def _refusal(
    name: str,
    kernel: Kernel,
    masked: bool,
    platform: str,
    head_dim: int,
    dtype: str,
    row_length: int,
    compute_capability: float | None,
) -> str | None:
    """Why a kernel would be wrong, None if it is right."""
    if platform != kernel.platform:
        return f"it runs on {kernel.platform.upper()}, this is {platform.upper()}"
    if dtype not in kernel.dtypes:
        return f"it computes in {' or '.join(kernel.dtypes)}, not {dtype}"
    if head_dim > kernel.largest_head_dim or head_dim % kernel.head_dim_step:
        return f"heads of size {head_dim} are not a multiple of {kernel.head_dim_step} up to {kernel.largest_head_dim}"
    if name == "cudnn" and head_dim > CUDNN_SMALL_HEAD_DIM and (compute_capability or 0) < CUDNN_LARGE_HEAD_CAPABILITY:
        return f"heads of size {head_dim} need a GPU of compute capability {CUDNN_LARGE_HEAD_CAPABILITY}"
    if row_length % kernel.row_step:
        return f"rows of {row_length} tokens are not a multiple of {kernel.row_step}"
    if masked and row_length > kernel.longest_masked_row:
        return f"a mask for rows of {row_length} tokens is too large (up to {kernel.longest_masked_row})"
    return None
