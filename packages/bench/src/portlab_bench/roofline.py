"""What no machine can do better: bounds on tokens per second and on the first token, and the guard made of them.

Every bound is generous to who is checked: dense products alone (2 FLOPs a weight and token), no attention, no
transfers between chips, published peaks reached, weights read once a step whatever the batch. What exceeds one was not
computed as it says: tokens came from a prefix cache, a unit is wrong, or the figure is. Weights are counted from the
published configurations by `portlab_spec.models`; of experts, the active ones.
"""

from dataclasses import dataclass

from portlab_bench.machines import WEIGHT_BYTES, Machine, Precision, parse_machine
from portlab_spec.errors import UserError
from portlab_spec.models.config import GemmaConfig
from portlab_spec.models.flops import ModelSize, model_size
from portlab_spec.models.published import published_config, published_models

# Clocks above nominal and rounded peaks: no figure within this factor of a bound is called impossible.
SLACK = 1.02


@dataclass(frozen=True)
class Verdict:
    """What the guard says.

    Attributes:
        ok: False if the figure is impossible.
        why: the bound beside the figure; empty if there was nothing to check with.
    """

    ok: bool
    why: str = ""


def base_size(config: GemmaConfig) -> ModelSize:
    """Weights that a token meets, without an adapter."""
    return model_size(config, ())


def prefill_limit(config: GemmaConfig, machine: Machine, precision: Precision = "bf16") -> float:
    """Prompt tokens per second at most: only the last token of a prompt needs logits, so the head counts nothing."""
    return machine.flops(precision) / (2 * base_size(config).linears)


def decode_limit(
    config: GemmaConfig, machine: Machine, precision: Precision = "bf16", batch: float | None = None
) -> float:
    """Output tokens per second at most; with the batch known, also by the weights that each step reads."""
    size = base_size(config)
    active = size.linears + size.head
    limit = machine.flops(precision) / (2 * active)
    if batch is not None:
        limit = min(limit, batch * machine.hbm_bandwidth / (active * WEIGHT_BYTES[precision]))
    return limit


def ttft_limit(
    config: GemmaConfig,
    machine: Machine,
    prompt_tokens: float,
    precision: Precision = "bf16",
    *,
    burst: int = 1,
    share: float = 0.5,
) -> float:
    """Seconds to the first token at least, of the request below which `share` of a burst lies.

    Of requests that arrive together, a share has its first token only when that share of all prompts is computed,
    whatever the order.
    """
    prompts = max(1.0, burst * share)
    return prompts * prompt_tokens / prefill_limit(config, machine, precision)


def train_limit(config: GemmaConfig, machine: Machine, *, method: str = "lora") -> float:
    """Tokens per second at most of a training step: forward and input gradients, and of "full" those of weights."""
    return machine.bf16_flops / ((6 if method == "full" else 4) * base_size(config).linears)


def check_rate(what: str, rate: float, limit: float, unit: str = "tokens/s") -> Verdict:
    """Hold a rate against its bound."""
    if rate > limit * SLACK:
        return Verdict(False, f"{rate:,.0f} {unit} of {what} are {rate / limit:.1f}x the bound, {limit:,.0f}")
    return Verdict(True, f"{rate / limit:.0%} of the bound of {what}, {limit:,.0f} {unit}")


def check_seconds(what: str, seconds: float, limit: float) -> Verdict:
    """Hold a time against the least that it takes."""
    if seconds * SLACK < limit:
        return Verdict(
            False, f"{what} of {seconds * 1e3:,.0f} ms is {limit / seconds:.1f}x below the bound, {limit * 1e3:,.0f} ms"
        )
    return Verdict(True, f"{what} is {seconds / limit:.1f}x the bound, {limit * 1e3:,.1f} ms")


def peaks(hardware: str, architecture: str, precision: Precision) -> tuple[float, float] | None:
    """Prompt and output tokens per second at most of a published model on a machine; None if no model is named.

    Raises:
        UserError: no such machine or model, or a model without a machine.
    """
    machine = parse_machine(hardware) if hardware else None
    if not architecture:
        return None
    config = published_config(architecture)
    if config is None:
        known = ", ".join(published_models())
        raise UserError("no published model", where=f"--architecture {architecture}", fix=f"Use one of {known}")
    if machine is None:
        what = "bounds nothing without --hardware"
        raise UserError(what, where="--architecture", fix="Give --hardware too, such as v6e-8")
    return prefill_limit(config, machine, precision), decode_limit(config, machine, precision)
