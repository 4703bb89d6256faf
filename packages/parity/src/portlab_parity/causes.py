"""Known causes of differences between backends, each with a test that confirms it on the numbers.

A test gets the evidence of a backend that is taken to be right and of one that is not. It says what it found in a
sentence, or None: that something looks like a cause is no reason to name it.
"""

from collections.abc import Callable
from typing import NamedTuple

from portlab_parity import causes_layers as layers
from portlab_parity import causes_steps as steps
from portlab_parity import causes_tokens as tokens
from portlab_parity.case import Case
from portlab_parity.compare import Comparison, rows
from portlab_spec.errors import UserError
from portlab_spec.evidence import Evidence, row_digest


class Cause(NamedTuple):
    """A mistake that is known.

    Attributes:
        name: of it.
        test: confirms it.
        stages: where it may be the first difference.
        confirmed: by what, in words.
        fix: what to do about it.
    """

    name: str
    test: Callable[[Case], str | None]
    stages: tuple[str, ...]
    confirmed: str
    fix: str


class Finding(NamedTuple):
    """A cause that was confirmed.

    Attributes:
        cause: the one.
        backend: whose mistake it is.
        said: what was found.
    """

    cause: Cause
    backend: str
    said: str


FORWARD = ("layers", "final norm", "logits", "loss")
CAUSES = (
    Cause(
        "double BOS",
        tokens.double_bos,
        ("tokens",),
        "rows are the other's behind one more `<bos>`",
        "The template writes `<bos>` already: tokenise its text with add_special_tokens=False",
    ),
    Cause(
        "padding side",
        tokens.padding_side,
        ("tokens", "layers"),
        "rows are the other's with padding that counts as tokens, or only rows padded at the left differ",
        "Give the model the attention mask, or pad at the right",
    ),
    Cause(
        "label shift",
        tokens.shifted_targets,
        ("tokens",),
        "supervised tokens are the other's, one earlier or later",
        "Labels stand at their own tokens: models of transformers shift them",
    ),
    Cause(
        "prompt supervised",
        tokens.prompt_supervised,
        ("tokens",),
        "supervised tokens are the other's and some before the answers",
        "Set labels of everything before the answer to -100",
    ),
    Cause(
        "LoRA init",
        tokens.other_start,
        ("adapter at the start",),
        "its B is zero, or its A is unrelated to the given one",
        "Load the adapter that the comparison gives before the first step",
    ),
    Cause(
        "dropout on",
        layers.dropout_on,
        ("embedding", *FORWARD, "gradients"),
        "two forward passes of its own over one batch differ",
        "Set lora_dropout and attention_dropout to 0 to compare; dropout itself cannot be the same in two libraries",
    ),
    Cause(
        "embedding scale",
        layers.embedding_scale,
        ("embedding",),
        "one factor between all embeddings",
        "Gemma multiplies embeddings by sqrt(D), rounded to the activations' type",
    ),
    Cause(
        "norm convention",
        layers.norm_convention,
        ("layers", "final norm"),
        "the tensor recomputed with w for 1 + w, or the reverse",
        "Gemma 3 norms multiply by 1 + weight, Gemma 4's by the weight",
    ),
    Cause(
        "LoRA scale",
        layers.lora_scale,
        ("layers",),
        "the tensor recomputed with another factor",
        "Scale by alpha / rank, or alpha / sqrt(rank) with use_rslora, as the recipe says",
    ),
    Cause(
        "query scale",
        layers.query_scale,
        ("layers",),
        "attention recomputed with another factor on its scores",
        "Gemma 3 scales by query_pre_attn_scalar ** -0.5, Gemma 4 by 1",
    ),
    Cause(
        "RoPE base",
        layers.rope_base,
        ("layers",),
        "attention recomputed with other angles",
        "Sliding and full layers have their own bases: rope_local_base_freq and rope_theta",
    ),
    Cause(
        "sliding window",
        layers.window_mask,
        ("layers",),
        "attention recomputed with another window",
        "A token of a sliding layer sees sliding_window tokens, itself included; full layers see all",
    ),
    Cause(
        "causal mask",
        layers.causal_mask,
        ("layers",),
        "attention recomputed without hiding what is behind a token",
        "Give attention a causal mask; a mask of padding alone is none",
    ),
    Cause(
        "softcap",
        layers.softcap,
        ("logits",),
        "logits recomputed with and without the bound",
        "Squash logits by final_logit_softcapping where the config has it, and nowhere else",
    ),
    Cause(
        "tied head",
        layers.tied_head,
        ("logits",),
        "final states times embeddings are the other's logits alone",
        "Gemma's head is its embedding: tie the weights after loading, and after wrapping the model",
    ),
    Cause(
        "label shift",
        steps.label_shift,
        ("loss",),
        "the loss recomputed from logits one position off",
        "Logits at a position predict the next token",
    ),
    Cause(
        "loss normalisation",
        steps.loss_normalisation,
        ("loss", "gradients"),
        "the loss recomputed as another mean of the same tokens, or one factor between all gradients",
        "Divide the sum by all supervised tokens of the step, once, whatever its parts",
    ),
    Cause(
        "not trained",
        steps.not_trained,
        ("gradients",),
        "gradients of some tensors are zero",
        "Check which layers are adapted, and that nothing froze or detached them",
    ),
    Cause(
        "schedule off by one",
        steps.schedule_shift,
        ("learning rate",),
        "rates are the recipe's of another step, or those of a warm-up from zero",
        "The first step's rate is above zero: peak * (t + 1) / (warmup + 1) at step t from 0",
    ),
    Cause(
        "optimiser epsilon",
        steps.adam_epsilon,
        ("adapter",),
        "the update recomputed from agreed gradients with another epsilon",
        "Give the optimiser the recipe's eps",
    ),
    Cause(
        "bias correction",
        steps.bias_correction,
        ("adapter",),
        "the update recomputed without the correction",
        "Use an Adam that corrects both moments",
    ),
    Cause(
        "weight decay",
        steps.weight_decay,
        ("adapter",),
        "the update recomputed with another decay, or one in the gradient",
        "Use AdamW, whose decay is decoupled, with the recipe's weight_decay",
    ),
    Cause(
        "optimiser betas",
        steps.adam_betas,
        ("adapter",),
        "the update recomputed with other decay rates of the moments",
        "Give the optimiser the recipe's b1 and b2: PyTorch's default for b2 is 0.999",
    ),
    Cause(
        "gradient clip",
        steps.gradient_clip,
        ("gradient norm", "adapter"),
        "the update recomputed without the clip or with another, or a norm that equals its bound",
        "Clip all gradients together to the recipe's clip_norm; the norm is taken before",
    ),
)


def as_given(evidence: Evidence) -> bool:
    """Are a backend's tokens those of the work?"""
    found = [row_digest(ids, target) for ids, target in rows(evidence)]
    return found == list(evidence.about.rows.values())


def explain(comparison: Comparison, a: Evidence, b: Evidence) -> tuple[Finding | None, str]:
    """The cause of the first difference.

    Returns:
        The finding, or None if no cause fits; and why some were not tested, "" if all were.
    """
    difference = comparison.difference
    if difference is None:
        return None, ""
    untested = ""
    for good, bad in ((a, b), (b, a)):
        if difference.stage == "tokens" and not as_given(good) and as_given(bad):
            continue
        case = Case(good, bad, difference, comparison.dtype)
        for cause in CAUSES:
            if difference.stage not in cause.stages:
                continue
            try:
                said = cause.test(case)
            except UserError as error:
                untested = f"not every cause could be tested: {error}"
                continue
            if said is not None:
                return Finding(cause, bad.about.backend, said), untested
    return None, untested
