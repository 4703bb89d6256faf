"""Known causes of differences in the loss, the gradients, the learning rate and the optimiser."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np

from portlab_parity.case import CLOSER, Case, constant_ratio
from portlab_parity.compare import rms, rows
from portlab_parity.steps import Adam, updates
from portlab_spec.schedule import learning_rates

SAME = 2e-4  # relative, between losses and rates
SAME_UPDATE = 5e-3  # of an update, in the mean square
UNEXPLAINED = 0.1  # most of a difference that an explanation leaves


def _close(x: float, y: float) -> bool:
    return bool(np.isclose(x, y, rtol=SAME, atol=1e-12))


def _loss(case: Case) -> tuple[float, float] | None:
    """The two losses of the first step, if that is what differs."""
    if case.difference.stage != "loss" or case.difference.step != 1 or case.tensor != "loss":
        return None
    return float(case.good.tensors["loss"][0]), float(case.bad.tensors["loss"][0])


def label_shift(case: Case) -> str | None:
    """Tokens predicted from their own position, or from two before."""
    losses = _loss(case)
    if losses is None:
        return None
    scores = -case.good.tensors["log_likelihood"].astype(np.float64)
    for column, said in ((2, "the position of the token itself"), (0, "two positions before")):
        value = float(scores[:, column].mean())
        if _close(value, losses[1]) and _close(float(scores[:, 1].mean()), losses[0]):
            return f"the loss {losses[1]:.6g} is that of logits at {said}; at the one before, it is {losses[0]:.6g}"
    return None


def loss_normalisation(case: Case) -> str | None:
    """The same sum of the same tokens' losses, divided by something else."""
    losses = _loss(case)
    if losses is None:
        return _scaled_gradient(case)
    recipe = case.good.about.recipe
    scores = -case.good.tensors["log_likelihood"][:, 1].astype(np.float64)
    counts = [sum(target) for _, target in rows(case.good)]
    by_row = np.split(scores, np.cumsum(counts)[:-1])
    total, tokens = float(scores.sum()), sum(counts)
    real, padded = sum(case.lengths), case.good.tensors["ids"].size
    parts = [np.concatenate(p) for p in np.array_split(np.array(by_row, object), recipe.accumulate)]
    values = {
        "the sum over tokens": total,
        "the mean of the rows' means": float(np.mean([row.mean() for row in by_row])),
        "the sum over tokens divided by the rows": total / len(counts),
        "the sum of the rows' means": float(np.sum([row.mean() for row in by_row])),
        "the mean of the micro-batches' means": float(np.mean([part.mean() for part in parts])),
        "the sum over tokens divided by all tokens, prompts included": total / real,
        "the sum over tokens divided by all columns, padding included": total / padded,
        "the sum over tokens divided by all columns but one": total / (padded - len(counts)),
        "the sum of the means of micro-batches": float(np.sum([part.mean() for part in parts])),
    }
    if not _close(total / tokens, losses[0]):
        return None
    for said, value in values.items():
        if _close(value, losses[1]):
            return f"{losses[1]:.6g} is {said}; the mean over all {tokens} supervised tokens is {losses[0]:.6g}"
    return None


def _scaled_gradient(case: Case) -> str | None:
    if case.difference.stage != "gradients" or case.difference.step != 1:
        return None
    good, bad = (e.named("gradient.1.") for e in (case.good, case.bad))
    if good.keys() != bad.keys():
        return None
    flat = [np.concatenate([x[name].ravel() for name in good]) for x in (good, bad)]
    factor = constant_ratio(flat[0], flat[1], 1e-3)
    left = np.inf if factor is None else rms(flat[1] - factor * flat[0])
    if factor is None or left > CLOSER * rms(flat[1] - flat[0]):
        return None
    return f"the loss agrees, and every gradient is {factor:.6g} times the other's: it is divided once more or less"


def not_trained(case: Case) -> str | None:
    """Parts of the adapter that no gradient reaches."""
    if case.difference.stage != "gradients":
        return None
    step = case.difference.step
    good, bad = (e.named(f"gradient.{step}.") for e in (case.good, case.bad))
    still = [name for name in good if good[name].any() and not bad.get(name, np.zeros(1)).any()]
    if not still:
        return None
    return f"no gradient reaches {still[0]} and {len(still) - 1} more of {len(good)} tensors"


def clip_before_norm(case: Case) -> str | None:
    """A norm that is that of gradients after the clip."""
    if case.difference.stage != "gradient norm":
        return None
    good, bad = (float(e.tensors["grad_norm"][case.difference.step - 1]) for e in (case.good, case.bad))
    bound = case.good.about.recipe.optimizer.clip_norm
    for said, value in (("the recipe's bound", bound), ("1, another bound", 1.0)):
        if good > value and _close(bad, value):
            return (
                f"its norm {bad:.6g} is {said}: gradients were clipped before the norm was taken, which is {good:.6g}"
            )
    return None


def schedule_shift(case: Case) -> str | None:
    """Learning rates of the step before or behind, or a warm-up from zero."""
    settings, steps = case.good.about.recipe.optimizer, case.good.about.recipe.steps
    if case.difference.stage != "learning rate":
        return None
    k = case.good.steps
    planned = learning_rates(settings, max(steps, k + 2)) if steps < k + 2 else learning_rates(settings, steps)
    bad, good = (e.tensors["learning_rate"].astype(np.float64) for e in (case.bad, case.good))
    if not np.allclose(good, planned[:k], rtol=1e-5, atol=0):
        return None
    if np.allclose(bad, planned[1 : k + 1], rtol=1e-5, atol=1e-12):
        return f"the rate of each step is the recipe's of the next: {_list(bad)} instead of {_list(good)}"
    if np.allclose(bad[1:], planned[: k - 1], rtol=1e-5, atol=1e-12):
        return f"the rate of each step is the recipe's of the one before: {_list(bad)} instead of {_list(good)}"
    warmup = settings.warmup_steps
    early = [settings.learning_rate * t / warmup for t in range(min(warmup, k))] if warmup else []
    if early and np.allclose(bad[: len(early)], early, rtol=1e-5, atol=1e-12):
        return (
            f"its warm-up starts at zero, t / {warmup} of the peak; the recipe's is (t + 1) / {warmup + 1}: "
            f"{_list(bad)} instead of {_list(good)}"
        )
    return None


def _list(rates: np.ndarray) -> str:
    return ", ".join(f"{rate:.3g}" for rate in rates)


def _mistakes(meant: Adam, largest: float) -> Iterator[tuple[str, str, Adam]]:
    """What optimisers get wrong: cause, what to say, and the settings with which they compute.

    Args:
        meant: the recipe's.
        largest: norm of the gradients; a clip above it is none.
    """

    def other(**changes: Any) -> Adam:
        return dataclasses.replace(meant, **changes)

    for eps in (10.0**-power for power in range(3, 13)):
        yield "epsilon", f"epsilon is {eps:g}, the recipe means {meant.eps:g}", other(eps=eps)
    yield "epsilon", "epsilon is added under the root", other(eps_inside=True)
    yield "correction", "moments are not corrected for their start at zero", other(corrected=False)
    for decay in (0.0, 0.1, 0.01, 0.001, 0.05):
        said = f"weights decay by {decay:g}, the recipe means {meant.weight_decay:g}"
        yield "decay", said, other(weight_decay=decay)
        if decay:
            said = f"a decay of {decay:g} is added to the gradient (L2), not to the update"
            yield "decay", said, other(weight_decay=decay, decoupled=False)
    for b1 in dict.fromkeys((meant.b1, 0.9, 0.95)):
        for b2 in (0.999, 0.99, 0.95, 0.98):
            said = f"b1 and b2 are {b1:g} and {b2:g}, the recipe means {meant.b1:g} and {meant.b2:g}"
            yield "betas", said, other(b1=b1, b2=b2)
    yield "clip", f"gradients are not clipped, the recipe clips to {meant.clip_norm:g}", other(clip="none")
    yield "clip", "every tensor's gradient is clipped by itself", other(clip="each")
    for bound in (b for b in (1.0, 0.5, 0.3, 5.0) if b < largest):
        said = f"gradients are clipped to {bound:g}, the recipe means {meant.clip_norm:g}"
        yield "clip", said, other(clip_norm=bound)


def _optimiser(case: Case, which: str) -> str | None:
    """What explains an update best, if it is of this kind."""
    if "optimiser" not in case.memo:
        case.memo["optimiser"] = _best_mistake(case)
    best: tuple[str, str] | None = case.memo["optimiser"]
    return best[1] if best is not None and best[0] == which else None


def _best_mistake(case: Case) -> tuple[str, str] | None:
    """Kind and words of what explains an update best; mistakes resemble each other in the first steps."""
    recipe, step = case.good.about.recipe, case.difference.step
    if case.difference.stage != "adapter" or recipe.optimizer.name != "adamw":
        return None
    start = case.good.named("adapter.0.")
    gradients = [case.good.named(f"gradient.{t}.") for t in range(1, step + 1)]
    rates = case.good.tensors["learning_rate"][:step].tolist()

    def changed(which: dict[str, np.ndarray]) -> np.ndarray:
        return np.concatenate([(which[name].astype(np.float64) - start[name]).ravel() for name in start])

    def simulated(adam: Adam) -> np.ndarray:
        found = updates(start, gradients, rates, adam)
        return np.concatenate([found[name].ravel() for name in start])

    good, bad = (changed(e.named(f"adapter.{step}.")) for e in (case.good, case.bad))
    meant = Adam.of(recipe.optimizer)
    whole, largest = rms(bad - good), float(case.good.tensors["grad_norm"][:step].max())
    if rms(simulated(meant) - good) > min(SAME_UPDATE * rms(good), UNEXPLAINED * whole):
        return None
    left, kind, said = min(
        (rms(simulated(wrong) - bad), kind, said) for kind, said, wrong in _mistakes(meant, largest) if wrong != meant
    )
    if left > min(SAME_UPDATE * rms(bad), UNEXPLAINED * whole):
        return None
    return kind, f"{said}: so recomputed from the agreed gradients, {left / whole:.1%} of the difference is left"


def adam_epsilon(case: Case) -> str | None:
    """Another epsilon, or one in another place."""
    return _optimiser(case, "epsilon")


def bias_correction(case: Case) -> str | None:
    """Moments that are not divided by what they lack in the first steps."""
    return _optimiser(case, "correction")


def adam_betas(case: Case) -> str | None:
    """Other decay rates of the moments."""
    return _optimiser(case, "betas")


def weight_decay(case: Case) -> str | None:
    """Another decay, or one that is added to the gradient."""
    return _optimiser(case, "decay")


def gradient_clip(case: Case) -> str | None:
    """Gradients that are not clipped, clipped elsewhere, or each by itself."""
    return clip_before_norm(case) or _optimiser(case, "clip")
