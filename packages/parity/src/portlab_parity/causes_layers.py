"""Known causes of differences in the forward pass, confirmed by computing what the mistake would give."""

import dataclasses
import math
from collections.abc import Iterator

import numpy as np

from portlab_parity.case import Case, constant_ratio
from portlab_parity.compare import rms
from portlab_parity.layers import Attention, Settings, attend
from portlab_spec.errors import UserError
from portlab_spec.evidence import Evidence, probe_columns
from portlab_spec.evidence.places import logit_rows
from portlab_spec.models import Rope

REPEATED = 64.0  # roundings between two passes that draw nothing


def dropout_on(case: Case) -> str | None:
    """Something drawn at random: two passes of the backend itself differ."""
    own, other = case.bad.about.repeat, case.good.about.repeat
    rounding = 2.0**-23 if case.bad.about.dtype == "float32" else 2.0**-8
    if own <= REPEATED * rounding or own <= 10 * other:
        return None
    return (
        f"two forward passes over the same batch differ by {own:.2g} of their size, the other backend's by {other:.2g}"
    )


def embedding_scale(case: Case) -> str | None:
    """Embeddings that are the others' times a constant."""
    good, bad = (e.tensors[case.tensor] for e in (case.good, case.bad))
    factor = constant_ratio(good, bad, 1e-3)
    if factor is None or abs(factor - 1) < 1e-5:
        return None
    root = math.sqrt(case.config.hidden_size)
    ids = case.good.tensors["ids"][0][case.good.tensors["real"][0]][probe_columns(case.lengths[0])]
    if abs(rms(case.states(case.tensor, 0)) / (root * rms(case.layers.embeddings(ids))) - 1) > 0.1:
        return None  # it is the other one that is off
    known = {"not scaled at all": 1 / root, "scaled twice": root, f"scaled by {root**2:g} instead of its root": root}
    said = next((name for name, value in known.items() if abs(factor / value - 1) < 1e-4), "scaled by another factor")
    return f"they are {said}: {factor:.6g} times the other's, sqrt(D) is {root:.6g}"


def norm_convention(case: Case) -> str | None:
    """RMS norms that multiply by the weight where 1 + weight is meant, or the reverse."""
    meant = case.layers.settings()
    wrong = dataclasses.replace(meant, norm_offset=1.0 - meant.norm_offset)
    said = {0.0: "w", 1.0: "1 + w"}
    if not _explained_by(case, meant, wrong):
        return None
    return (
        f"its norms multiply by {said[wrong.norm_offset]}, the model means {said[meant.norm_offset]}: so recomputed, "
        f"{_left(case, wrong)}"
    )


def lora_scale(case: Case) -> str | None:
    """An adapter's product with another factor than alpha / rank, or alpha / sqrt(rank) with rsLoRA."""
    lora, meant = case.good.about.recipe.lora, case.layers.settings()
    own = {f"{lora.alpha / lora.rank:.6g}", f"{lora.scaling:.6g}"} if not lora.use_rslora else {f"{lora.scaling:.6g}"}
    candidates = {
        "alpha / sqrt(rank), as rsLoRA": lora.alpha / math.sqrt(lora.rank),
        "alpha / rank": lora.alpha / lora.rank,
        "alpha": lora.alpha,
        "1": 1.0,
        "1 / rank": 1.0 / lora.rank,
        "0: the adapter is left out": 0.0,
        "rank / alpha": lora.rank / lora.alpha,
        "twice the right one": 2 * lora.scaling,
        "half of the right one": lora.scaling / 2,
    }
    for said, factor in candidates.items():
        if f"{factor:.6g}" in own:
            continue
        wrong = dataclasses.replace(meant, lora_scale=factor)
        if _explained_by(case, meant, wrong):
            return (
                f"the adapter is scaled by {said} ({factor:.4g}) and the recipe means {lora.scaling:.4g}: so "
                f"recomputed, {_left(case, wrong)}"
            )
    return None


def _recomputed(case: Case, settings: Settings) -> np.ndarray | None:
    """What differs, recomputed from values on which both agree; None where that is not written."""
    stage, number = case.difference.stage, case.difference.layer
    if stage == "final norm":
        last = f"hidden.layer.{case.config.num_hidden_layers - 1:02}"
        return case.layers.norm(case.good.tensors[last].astype(np.float64), "norm", settings)
    if stage != "layers" or number is None:
        return None
    x = case.layer_input(number)
    part = case.tensor.rpartition(".")[2]
    if part in ("query", "key", "value"):
        return case.layers.inner(number, x, part, settings)
    if case.tensor.startswith("hidden."):
        try:
            return case.layers.output(number, x, case.good.tensors[f"inner.{number:02}.attended"], settings)
        except UserError:
            return None
    return None


def _kept(case: Case, evidence: Evidence) -> np.ndarray:
    """The part of what differs that `_recomputed` gives."""
    if case.tensor.startswith("hidden.layer."):
        return case.states(case.tensor, case.longest, evidence)
    found: np.ndarray = evidence.tensors[case.tensor]
    if case.tensor.endswith((".key", ".value")):
        return found[probe_columns(len(found))]
    return found


def _explained_by(case: Case, meant: Settings, wrong: Settings) -> bool:
    right, mistaken = _recomputed(case, meant), _recomputed(case, wrong)
    if right is None or mistaken is None:
        return False
    return case.near(right, _kept(case, case.good)) and case.explains(mistaken, _kept(case, case.bad))


def _left(case: Case, wrong: Settings) -> str:
    found = _recomputed(case, wrong)
    assert found is not None
    left = case.error(found, _kept(case, case.bad))
    return f"{left:.0f} roundings are left of {case.difference.error:.0f}"


def _attended(case: Case, settings: Attention) -> np.ndarray | None:
    """Attention's output in the layer that differs, recomputed."""
    number = case.difference.layer
    if number is None or not case.tensor.endswith(".attended"):
        return None
    tensors, kinds, source = case.good.tensors, case.config.layers, number
    if kinds[number].shares_kv:
        own = [i for i in range(number) if kinds[i].attention == kinds[number].attention and not kinds[i].shares_kv]
        source = own[-1]
    names = [f"inner.{number:02}.query", f"inner.{source:02}.key", f"inner.{source:02}.value"]
    if any(name not in tensors for name in names):
        return None
    q, k, v = (tensors[name] for name in names)
    return attend(q, k, v, probe_columns(len(k)), settings)


def _attention(case: Case, mistakes: Iterator[tuple[str, Attention]]) -> str | None:
    number = case.difference.layer
    if number is None or case.difference.stage != "layers":
        return None
    meant = case.layers.attention(number)
    right = _attended(case, meant)
    if right is None or not case.near(right, case.good.tensors[case.tensor]):
        return None
    bad = case.bad.tensors[case.tensor]
    for said, wrong in mistakes:
        found = _attended(case, wrong)
        if wrong != meant and found is not None and case.explains(found, bad):
            left = case.error(found, bad)
            return f"{said}: so recomputed, {left:.0f} roundings are left of {case.difference.error:.0f}"
    return None


def query_scale(case: Case) -> str | None:
    """Scores with another factor."""

    def mistakes() -> Iterator[tuple[str, Attention]]:
        number = case.difference.layer or 0
        meant, size = case.layers.attention(number), case.config.layers[number].head_dim
        width, heads = case.config.hidden_size, case.config.num_attention_heads
        for said, scale in {
            "1": 1.0,
            "1 / sqrt(head size)": size**-0.5,
            "1 / head size": 1.0 / size,
            "1 / sqrt(D / heads)": (width / heads) ** -0.5,
            "its square, applied twice": meant.scale**2,
            "its root": meant.scale**0.5,
            "twice the right one": 2 * meant.scale,
            "half of the right one": meant.scale / 2,
        }.items():
            if not math.isclose(scale, meant.scale):
                wrong = dataclasses.replace(meant, scale=scale)
                yield f"scores are multiplied by {said} ({scale:.4g}), the model means {meant.scale:.4g}", wrong

    return _attention(case, mistakes())


def rope_base(case: Case) -> str | None:
    """Queries and keys turned by other angles."""

    def mistakes() -> Iterator[tuple[str, Attention]]:
        meant = case.layers.attention(case.difference.layer or 0)
        assert meant.rope is not None
        others = {kind.rope for kind in case.config.layers} - {meant.rope}
        thetas = {rope.theta for rope in others} | {1e4, 1e5, 1e6}
        found = [(f"base {rope.theta:g}, of the other kind of layers", rope) for rope in others]
        found += [(f"base {theta:g}", dataclasses.replace(meant.rope, theta=theta)) for theta in sorted(thetas)]
        found += [(f"factor {f:g}", dataclasses.replace(meant.rope, factor=f)) for f in (1.0, 8.0)]
        found += [(f"fraction {f:g}", dataclasses.replace(meant.rope, fraction=f)) for f in (1.0, 0.25)]
        said = f"the model means base {meant.rope.theta:g}, factor {meant.rope.factor:g}"
        for name, rope in found:
            yield f"queries and keys are turned with {name}, {said}", dataclasses.replace(meant, rope=_known(rope))
        yield f"queries and keys are not turned at all, {said}", dataclasses.replace(meant, rope=None)

    return _attention(case, mistakes())


def _known(rope: Rope) -> Rope:
    return dataclasses.replace(rope, scaling=None)


def window_mask(case: Case) -> str | None:
    """A sliding layer that sees further, less far, or as another kind of layer does."""

    def mistakes() -> Iterator[tuple[str, Attention]]:
        meant = case.layers.attention(case.difference.layer or 0)
        own = meant.window
        widths = [None, *((own - 1, own + 1, own // 2, 2 * own) if own else (case.config.window,))]
        for window in widths:
            said = "all before it" if window is None else f"{window} tokens"
            yield f"a token sees {said}, the model means {own or 'all'}", dataclasses.replace(meant, window=window)

    return _attention(case, mistakes())


def causal_mask(case: Case) -> str | None:
    """Tokens that see those behind them."""

    def mistakes() -> Iterator[tuple[str, Attention]]:
        meant = case.layers.attention(case.difference.layer or 0)
        for window in dict.fromkeys((meant.window, None)):
            yield "tokens see those behind them", dataclasses.replace(meant, causal=False, window=window)

    return _attention(case, mistakes())


def softcap(case: Case) -> str | None:
    """Logits that are not squashed, or squashed by another bound."""
    if case.tensor != "logits":
        return None
    good, bad = (e.tensors["logits"].astype(np.float64) for e in (case.good, case.bad))
    cap = case.config.final_softcap
    raw = good if cap is None else cap * np.arctanh(np.clip(good / cap, -1 + 1e-12, 1 - 1e-12))
    # Near the bound the inverse loses digits: what is far from it decides.
    clear = np.ones_like(good, bool) if cap is None else np.abs(good) < 0.9 * cap
    tried = {None: "none"} | {c: f"{c:g}" for c in (30.0, 50.0)}
    for other in tried:
        if other == cap:
            continue
        squashed = raw if other is None else other * np.tanh(raw / other)
        if case.explains(squashed[clear], bad[clear]):
            meant = "none" if cap is None else f"{cap:g}"
            return f"the bound of its logits is {tried[other]}, the model means {meant}; final states agree"
    return None


def tied_head(case: Case) -> str | None:
    """A head that is not the embedding: hidden states agree, and are multiplied by another matrix."""
    if case.tensor != "logits" or not case.config.tie_word_embeddings:
        return None
    finals, targets = _scored_states(case)
    if finals is None:
        return None
    ids, vectors = _embeddings(case)
    cap = case.config.final_softcap
    logits = finals.astype(np.float64) @ vectors.T
    logits = logits if cap is None else cap * np.tanh(logits / cap)
    good, bad = (e.tensors["logits"][targets][:, ids] for e in (case.good, case.bad))
    if not case.near(logits, good) or case.near(logits, bad):
        return None
    alike = float(np.corrcoef(bad.ravel(), good.ravel())[0, 1])
    return (
        f"final states times the embeddings of {len(ids)} tokens are the other backend's logits and not its own, which "
        f"correlate with them by {alike:.2f}: its head is another matrix"
    )


def _scored_states(case: Case) -> tuple[np.ndarray | None, list[int]]:
    """Final states that predict tokens whose logits were kept, as far as they were probed, and which those are."""
    finals, kept, places = [], [], []
    for row, target in enumerate(case.good.tensors["target"]):
        real = case.good.tensors["real"][row]
        columns = probe_columns(case.lengths[row]).tolist()
        for t in np.flatnonzero(target[real]):
            places.append((row, columns.index(t - 1) if t - 1 in columns else None))
    chosen = logit_rows(len(places), case.good.tensors["logits"].shape[1])
    for number, index in enumerate(chosen):
        row, place = places[index]
        if place is not None:
            finals.append(case.states("hidden.final", row)[place])
            kept.append(number)
    return (np.stack(finals) if finals else None), kept


def _embeddings(case: Case) -> tuple[list[int], np.ndarray]:
    """Tokens that occur, and their embeddings before scaling, from the hidden states."""
    found: dict[int, np.ndarray] = {}
    root = math.sqrt(case.config.hidden_size)
    for row in range(len(case.lengths)):
        ids = case.good.tensors["ids"][row][case.good.tensors["real"][row]]
        states = case.states("hidden.embedding", row)
        for column, state in zip(probe_columns(case.lengths[row]), states, strict=True):
            found[int(ids[column])] = state.astype(np.float64) / root
    return list(found), np.stack(list(found.values()))
