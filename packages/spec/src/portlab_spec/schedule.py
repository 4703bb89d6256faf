"""Learning rates: a linear warm-up, then one of five shapes. One table for a run, whichever trainer reads it."""

import numpy as np

from portlab_spec.recipe import Optimizer


def learning_rates(optimizer: Optimizer, steps: int) -> np.ndarray:
    """The recipe's learning rate at every step, float32 (steps,); computed in float64 and rounded once.

    With peak p, w warm-up steps and n steps in all, the rate at step t, from 0, is p (t + 1) / (w + 1) in the warm-up:
    above zero from the start, since a first step with rate 0 would be computed for nothing. It is p at step w, and the
    decaying shapes reach `final_fraction` of it at the last step, n - 1.
    """
    step_t = np.arange(steps, dtype=np.float64)
    ramp_t = (step_t + 1) / (optimizer.warmup_steps + 1)
    after_t = np.maximum(step_t - optimizer.warmup_steps, 0)
    share_t = np.where(step_t < optimizer.warmup_steps, ramp_t, _after_warmup(optimizer, steps, after_t))
    return (optimizer.learning_rate * share_t).astype(np.float32)


def _after_warmup(optimizer: Optimizer, steps: int, step_t: np.ndarray) -> np.ndarray:
    """Share of the peak behind the warm-up; the shapes' own step 0 is step `warmup_steps` of the run."""
    warmup, final = optimizer.warmup_steps, optimizer.final_fraction
    span = max(steps - warmup - 1, 1)
    match optimizer.schedule:
        case "constant":
            return np.ones_like(step_t)
        case "linear":
            return _line(step_t / span, final)
        case "cosine":
            return final + (1 - final) * (1 + np.cos(np.pi * step_t / span)) / 2
        case "wsd":
            # Warm-up, stable, decay (MiniCPM, arXiv 2404.06395), with a linear decay (arXiv 2405.18392).
            decay = min(optimizer.decay_steps(steps), span)
            return _line((step_t - (span - decay)) / decay, final)
        case "inverse_sqrt":
            # By the root of the step (arXiv 1706.03762, section 5.3), equal to the peak where the warm-up ends.
            return np.sqrt((warmup + 1) / (warmup + 1 + step_t))


def _line(progress_t: np.ndarray, final: float) -> np.ndarray:
    """From 1 at progress 0 to `final` at progress 1, level before."""
    return 1 - (1 - final) * np.maximum(progress_t, 0)
