"""Evidence of a training script in plain PyTorch: `python -m portlab_hf.evidence WORK OUT [SCRIPT.py]`.

The script is five functions, see `portlab_hf.plain_script`, which is also what runs without one.
"""

import importlib.util
import inspect
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft.tuners.lora.layer import ParamWrapper
from safetensors.torch import load_file

from portlab_hf.adapter_files import WEIGHTS, load_adapter
from portlab_hf.model import PEFT_PREFIX, base_of, module_prefix, trained_parameters
from portlab_hf.watch import watch
from portlab_spec.cli import run
from portlab_spec.data.tokens import Row
from portlab_spec.errors import UserError
from portlab_spec.evidence import About, Evidence, Work, probe_columns, read_work
from portlab_spec.evidence.places import log_likelihood, logit_rows, scored_columns
from portlab_spec.report import versions

LIBRARIES = ("torch", "transformers", "peft", "trl", "numpy")
FUNCTIONS = ("load", "batch", "loss", "optimizer", "clip")
Tokens = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Example:
    """A row as a script is given it.

    Attributes:
        ids: its tokens.
        supervised: which of them are to be predicted.
        text: all of it, "" if the rows have none.
    """

    ids: list[int]
    supervised: list[bool]
    text: str


def adapter_names(model: Any) -> dict[str, str]:
    """Names of trained parameters -> the names of the evidence."""
    prefix = module_prefix(base_of(model))
    inside = {name: module.parameter_name for name, module in model.named_modules() if isinstance(module, ParamWrapper)}
    names = {}
    for name in trained_parameters(model):
        module, found, leaf = name.rpartition(".lora_")
        if module in inside:
            module = f"{module.replace('.base_layer', '')}.{inside[module]}"
        plain = f"{module}{found}{leaf}" if found else name
        plain = plain.removeprefix(PEFT_PREFIX).removeprefix(prefix)
        names[name] = plain.replace(".default.weight", ".weight").removesuffix(".default")
    return names


def on_host(tensor: torch.Tensor) -> np.ndarray:
    """A copy, float32."""
    return tensor.detach().to("cpu", torch.float32).numpy().copy()


def trained_tensors(model: Any, prefix: str, names: Mapping[str, str], *, gradients: bool = False) -> Tokens:
    """The adapter, or its gradients, as tensors of the evidence."""
    found = {}
    for name, parameter in trained_parameters(model).items():
        value = parameter.grad if gradients else parameter
        found[prefix + names[name]] = on_host(torch.zeros_like(parameter) if value is None else value)
    return found


def load_script(path: Path) -> Any:
    """Run a script's file as a module.

    Raises:
        UserError: no such file, or a function is missing.
    """
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise UserError("no such script", where=str(path), fix="Give a Python file")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    if missing := [name for name in FUNCTIONS if not callable(getattr(script, name, None))]:
        raise UserError(
            f"the script has no {', '.join(missing)}",
            where=str(path),
            fix=f"Define {', '.join(FUNCTIONS)}, as portlab_hf/plain_script.py does",
        )
    return script


def collect(work: Work, script: Any, backend: str) -> Evidence:
    """Run a script's functions on the work.

    Raises:
        UserError: the script's adapter is another than the recipe's, or its batches are not what they should be.
    """
    recipe = work.recipe
    torch.manual_seed(recipe.seed)
    model, tokenizer = script.load(str(work.model), recipe)
    if not getattr(script, "KEEP_ADAPTER", False):
        start = Path(recipe.lora.start_from or "")
        load_adapter(model, load_file(start / WEIGHTS), f"{backend}, load")
    names = adapter_names(model)
    batches = [script.batch(examples(work, rows), tokenizer) for rows in work.steps]
    tensors: dict[str, np.ndarray] = dict(token_tensors(batches[0], backend))
    with torch.no_grad():
        repeats = [final_states(model, script, batches[0]) for _ in range(2)]
    tensors |= probed(repeats[0], tensors["real"])
    tensors |= scores(model, batches[0], tensors)
    finals = [seen["hidden.final"].float() for seen in repeats]
    repeat = (finals[0] - finals[1]).abs().max() / finals[0].square().mean().sqrt()
    tensors |= trained_tensors(model, "adapter.0.", names)
    tensors |= steps(model, script, recipe, batches, names)
    model.eval()
    generated = tuple(answer(model, prompt, work) for prompt in work.prompts)
    weight = next(base_of(model).parameters())
    about = About(
        backend=backend,
        dtype="bfloat16" if weight.dtype == torch.bfloat16 else "float32",
        versions=versions(*LIBRARIES),
        device=str(weight.device),
        recipe=recipe,
        model=work.model,
        rows=work.given,
        repeat=float(repeat),
        generated=generated,
    )
    return Evidence(about, tensors)


def examples(work: Work, rows: Sequence[Row]) -> list[Example]:
    """Rows as scripts take them."""
    return [Example(list(row.ids), list(row.loss), work.texts.get(row.id, "")) for row in rows]


def token_tensors(batch: Mapping[str, torch.Tensor], where: str) -> Tokens:
    """`ids`, `real` and `target` of a script's batch.

    Raises:
        UserError: it is no batch of rows with labels.
    """
    ids, labels = batch.get("input_ids"), batch.get("labels")
    if ids is None or labels is None or ids.ndim != 2 or ids.shape != labels.shape:
        raise UserError(
            "a batch needs input_ids and labels of one shape, a row for each example",
            where=f"{where}, batch",
            fix="Return them, unpacked, with -100 as the label of what is not supervised",
        )
    mask = batch.get("attention_mask")
    real = torch.ones_like(ids) if mask is None else mask
    return {
        "ids": ids.cpu().numpy().astype(np.int32),
        "real": real.cpu().numpy().astype(bool),
        "target": (labels != -100).cpu().numpy(),
    }


def final_states(model: Any, script: Any, batch: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """What the model computes on the way to the script's loss."""
    with watch(base_of(model)) as seen:
        script.loss(model, batch)
    return seen


def probed(seen: Mapping[str, Any], real: np.ndarray) -> Tokens:
    """The probed tokens' part of what was seen."""
    columns = [np.flatnonzero(row) for row in real]
    longest = int(np.argmax([len(c) for c in columns]))
    found = {}
    for name, x in seen.items():
        if name.startswith("inner."):
            index = columns[longest]
            if not name.endswith((".key", ".value")):
                index = index[probe_columns(len(index))]
            found[name] = on_host(x[longest, index])
        else:
            parts = [x[r, c[probe_columns(len(c))]] for r, c in enumerate(columns)]
            found[name] = on_host(torch.cat(parts))
    return found


def scores(model: Any, batch: Mapping[str, torch.Tensor], tokens: Tokens) -> Tokens:
    """`logits` and `log_likelihood`, from the model's own forward pass."""
    wanted = []  # (row, column of the token, column where it is scored), three for each supervised token
    for r, real in enumerate(tokens["real"]):
        columns = np.flatnonzero(real)
        pairs = scored_columns(tokens["target"][r][columns])
        wanted += [(r, columns[t], columns[position]) for t, position in pairs]
    used = sorted({int(column) for _, _, column in wanted})
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask", "token_type_ids") if name in batch}
    keeps = "logits_to_keep" in inspect.signature(base_of(model).forward).parameters
    more = {"logits_to_keep": torch.tensor(used)} if keeps else {}
    with torch.no_grad():
        logits = model(**inputs, **more, use_cache=False).logits
    place = {column: i if keeps else column for i, column in enumerate(used)}
    likely = []
    for r, token, column in wanted:
        row = on_host(logits[r, place[int(column)]])[None]
        likely.append(log_likelihood(row, tokens["ids"][r, token : token + 1]))
    right = wanted[1::3]
    chosen = [right[i] for i in logit_rows(len(right), logits.shape[-1])]
    kept = np.stack([on_host(logits[r, place[int(column)]]) for r, _, column in chosen])
    return {"logits": kept, "log_likelihood": np.array(likely).reshape(-1, 3)}


def steps(model: Any, script: Any, recipe: Any, batches: Sequence[Any], names: Mapping[str, str]) -> Tokens:
    """Train, and keep what each step computes."""
    optimizer, scheduler = script.optimizer(model, recipe)
    found: dict[str, Any] = {name: [] for name in ("loss", "supervised", "grad_norm", "learning_rate")}
    for number, batch in enumerate(batches, 1):
        loss = script.loss(model, batch)
        loss.backward()
        found |= trained_tensors(model, f"gradient.{number}.", names, gradients=True)
        norm = script.clip(model, recipe)
        found["loss"].append(float(loss.detach()))
        found["supervised"].append(float((batch["labels"] != -100).sum()))
        found["grad_norm"].append(float(norm))
        found["learning_rate"].append(float(optimizer.param_groups[0]["lr"]))
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        optimizer.zero_grad()
        found |= trained_tensors(model, f"adapter.{number}.", names)
    return {name: np.array(x, np.float32) for name, x in found.items()}


@torch.no_grad()
def answer(model: Any, prompt: Sequence[int], work: Work) -> tuple[int, ...]:
    """What the model says greedily, up to and including the token that ends it."""
    ids = torch.tensor([list(prompt)], device=next(model.parameters()).device)
    said = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=work.new_tokens,
        eos_token_id=list(work.stop_ids),
        pad_token_id=0,
    )
    return tuple(said[0, len(prompt) :].tolist())


def main(argv: list[str]) -> int:
    """Write the evidence of a script."""
    work, out, *script = argv
    if script:
        module, name = load_script(Path(script[0])), Path(script[0]).stem
    else:
        from portlab_hf import plain_script

        module, name = plain_script, "plain"
    collect(read_work(Path(work)), module, name).save(Path(out))
    return 0


if __name__ == "__main__":
    run("portlab_hf.evidence", main, sys.argv[1:])
