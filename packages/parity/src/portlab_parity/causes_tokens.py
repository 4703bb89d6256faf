"""Known causes of differences in the tokens, in what is supervised, and in the adapter at the start."""

from pathlib import Path

import numpy as np

from portlab_parity.case import Case
from portlab_parity.compare import rms, rows
from portlab_parity.start import WEIGHTS
from portlab_spec.safetensors_file import open_file

BOS, PAD = 2, 0  # of every Gemma


def double_bos(case: Case) -> str | None:
    """Rows that begin with two BOS, and go on as the others do."""
    good, bad = (rows(e) for e in (case.good, case.bad))
    hits = [i for i, (g, b) in enumerate(zip(good, bad, strict=True)) if b[0] == [BOS, *g[0]] and g[0][:1] == [BOS]]
    if len(hits) != len(good):
        return None
    return f"every row begins with {BOS}, {BOS}, and is the other's row behind the first"


def padding_side(case: Case) -> str | None:
    """Padding that is taken for tokens: in the rows themselves, or by attention."""
    if case.difference.stage == "tokens":
        return _padding_in_rows(case)
    if case.difference.stage != "layers":
        return None
    real = case.bad.tensors["real"]
    left = np.array([not row[0] and row.any() for row in real])
    name = case.tensor
    if not left.any() or not name.startswith("hidden."):
        return None
    apart = np.array(
        [not case.near(case.states(name, r), case.states(name, r, case.bad)) for r in range(len(case.lengths))]
    )
    if not (apart == left).all():
        return None
    return (
        f"the {left.sum()} rows with padding at their left differ and the {(~left).sum()} others agree: attention sees "
        "the padding"
    )


def _padding_in_rows(case: Case) -> str | None:
    good, bad = (rows(e) for e in (case.good, case.bad))
    sides = set()
    for (g, _), (b, _) in zip(good, bad, strict=True):
        spare = len(b) - len(g)
        if spare <= 0:
            continue
        if b == [PAD] * spare + g:
            sides.add("left")
        elif b == g + [PAD] * spare:
            sides.add("right")
        else:
            return None
    if len(sides) != 1:
        return None
    side = sides.pop()
    return f"shorter rows are the other's with padding at the {side}, which no attention mask hides"


def prompt_supervised(case: Case) -> str | None:
    """Tokens of the prompt that are to be predicted."""
    if case.difference.stage != "tokens":
        return None
    extra = before = total = 0
    for (g_ids, g), (b_ids, b) in zip(rows(case.good), rows(case.bad), strict=True):
        if g_ids != b_ids or any(x and not y for x, y in zip(g, b, strict=True)):
            return None
        first = g.index(True) if True in g else len(g)
        added = [i for i, (x, y) in enumerate(zip(g, b, strict=True)) if y and not x]
        extra, before, total = extra + len(added), before + sum(i < first for i in added), total + sum(b)
    if not before:
        return None
    return f"{before} tokens before the answers are supervised too, {extra} of its {total} supervised tokens are extra"


def shifted_targets(case: Case) -> str | None:
    """Flags of supervision that stand one token off: labels were shifted before a loss that shifts them again."""
    if case.difference.stage != "tokens":
        return None
    for shift, said in ((-1, "before"), (1, "behind")):
        same = []
        for (g_ids, g), (b_ids, b) in zip(rows(case.good), rows(case.bad), strict=True):
            moved = np.zeros(len(g), bool)
            at = np.flatnonzero(g) + shift
            moved[at[(at >= 0) & (at < len(g))]] = True
            same.append(g_ids == b_ids and moved.tolist() == b)
        if all(same):
            return f"in every row the supervised tokens are those one {said} the right ones"
    return None


def other_start(case: Case) -> str | None:
    """An adapter that was drawn anew instead of loaded."""
    if case.difference.stage != "adapter at the start":
        return None
    good, bad = (e.named("adapter.0.") for e in (case.good, case.bad))
    if good.keys() != bad.keys() or any(good[name].shape != bad[name].shape for name in good):
        return None
    if _is_given(case, bad):
        return None
    b_names = [name for name in good if name.endswith("lora_B.weight")]
    a_names = [name for name in good if name.endswith("lora_A.weight")]
    zero = all(not bad[name].any() for name in b_names)
    flat_g, flat_b = (np.concatenate([x[name].ravel() for name in a_names]) for x in (good, bad))
    alike = float(np.corrcoef(flat_g, flat_b)[0, 1])
    bound = max(np.abs(bad[name]).max() * np.sqrt(bad[name].shape[-1]) for name in a_names)
    spread = np.mean([rms(bad[name]) * np.sqrt(bad[name].shape[-1]) for name in a_names])
    shape = "uniform" if bound <= 1.01 else "not PEFT's uniform"
    if not zero and abs(alike) > 0.5:
        return None
    return (
        f"its B is {'zero' if zero else 'drawn'}, its A correlates by {alike:.2f} with the given one and is {shape} "
        f"(standard deviation {spread:.2f} / sqrt(in))"
    )


def _is_given(case: Case, adapter: dict[str, np.ndarray]) -> bool:
    """Is an adapter the one in the work's folder, as far as that is still there?"""
    path = Path(case.good.about.recipe.lora.start_from or "") / WEIGHTS
    if not path.is_file():
        return False
    given = open_file(path)
    for name, x in adapter.items():
        found = [view for full, view in given.items() if full.endswith(f".{name}")]
        if found and found[0].shape == x.shape and not np.allclose(found[0].numpy(), x, rtol=1e-2):
            return False
    return True
