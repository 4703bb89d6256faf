"""A run as the job sees it: a model that answers, trains and is exported."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import torch

from portlab_hf.export import export_adapter, model_card, verify_adapter, verify_model
from portlab_hf.model import base_of, module_prefix
from portlab_spec.data.tokens import Row
from portlab_spec.files import write_json
from portlab_spec.mesh import describe as describe_mesh
from portlab_spec.mesh import replications
from portlab_spec.models import param_table
from portlab_spec.models.targets import describe
from portlab_spec.packing import BatchOrder
from portlab_spec.progress import bar
from portlab_spec.report import Evaluation, versions
from portlab_spec.run.data import RunRows
from portlab_spec.run.export import export_merged
from portlab_spec.run.export_full import export_full
from portlab_spec.run.job import Trained
from portlab_spec.run.loop import run_steps
from portlab_spec.run.metadata import planned_metadata
from portlab_spec.run.monitor import Throughput
from portlab_spec.run.signals import Preemption
from portlab_spec.run.trackers import open_trackers
from portlab_spec.run.train_log import best_step
from portlab_torchax import TRAINER
from portlab_torchax.checkpoint import Checkpoints, peft_tensors
from portlab_torchax.decode import Decoder
from portlab_torchax.export import as_stored, probe, sources
from portlab_torchax.functional import plain_torch
from portlab_torchax.setup import Setup, initial_state
from portlab_torchax.training import MeanLoss, TrainingSteps

LIBRARIES = ("jax", "jaxlib", "optax", "torch", "torchax", "transformers", "peft", "numpy", "tokenizers")

Say = Callable[[str], None]


class TorchaxSession:
    """`portlab_spec.run.job.Session` of this trainer.

    Attributes:
        setup: the run.
        trained: what is trained, as it stands.
    """

    def __init__(self, setup: Setup) -> None:
        self.setup, self.trained = setup, setup.start
        self._metadata: dict[str, Any] = {}
        self._decoder = Decoder(
            setup.program, setup.placement.groups, setup.placement.put_rows, setup.recipe.max_new_tokens
        )
        self._computed = jax.jit(lambda trained: setup.program.values(trained, {}))
        self._held_out: tuple[Sequence[Row], MeanLoss] | None = None

    def introduce(self) -> list[str]:
        """What is trained and where, a line each."""
        setup, found = self.setup, self.device()
        if setup.full:
            what = "all weights"
        else:
            rows = f", {len(setup.token_ids)} token rows" if setup.token_ids else ""
            what = f"adapters of {describe(setup.leaves)}{rows}"
        lines = [
            f"{setup.config.family}, {setup.config.num_hidden_layers} layers on {found['count']} {found['kind']} "
            f"device(s), {found['platform']}; training {what}"
        ]
        if found["count"] > 1:
            lines += [f"mesh {found['mesh']}", *replications(param_table(setup.config), setup.placement.shape)]
        return lines

    def device(self) -> dict[str, Any]:
        """The devices that JAX uses."""
        device, shape = self.setup.placement.device, self.setup.placement.shape
        found = {"platform": device.platform, "kind": device.device_kind, "count": math.prod(shape.values())}
        if speed := self._decoder.tokens_per_second:
            found["decoded_tokens_per_second"] = round(speed, 1)
        return found | {"mesh": describe_mesh(shape)}

    def disk_needed(self) -> int:
        """Bytes of a run: the model, and the checkpoints that are kept, each what is trained and two moments of it."""
        merged = sum(file.stat().st_size for file in self.setup.model.path.iterdir() if file.is_file())
        one = sum(leaf.nbytes for leaf in self.setup.start.values())
        # The newest is written before the oldest goes; the adapter is also exported.
        return merged + (self.setup.recipe.keep + self.setup.recipe.keep_best + 2) * 3 * one

    def generate(
        self, prompts: Sequence[Sequence[int]], stop_ids: Sequence[int], advance: Callable[[float], None]
    ) -> list[list[int]]:
        """Greedy continuation of each prompt."""
        values = self.setup.frozen | self._computed(self.trained)
        return self._decoder(values, prompts, stop_ids, advance=advance)

    def loss(self, rows: Sequence[Row]) -> float:
        """Mean cross-entropy over the supervised tokens of rows."""
        # The same rows before and after training: packed and compiled once.
        if self._held_out is None or self._held_out[0] is not rows:
            self._held_out = rows, MeanLoss(self.setup, rows)
        return self._held_out[1](self.trained)

    def train(self, rows: RunRows, order: BatchOrder, folder: Path, say: Say) -> Trained:
        """Train, from the newest checkpoint if there is one.

        Raises:
            CheckFailed: the loss is not finite, or something that is to be trained gets no gradient.
            UserError: a checkpoint of another run.
            Preempted: asked to leave; the step is saved.
        """
        setup, recipe = self.setup, self.setup.recipe
        plan = setup.plan(order, accumulate=recipe.accumulate, max_shapes=recipe.max_shapes)
        self._metadata = describe_run(setup, order)
        checkpoints = Checkpoints(folder / "checkpoints", self._metadata, setup)
        state, log = checkpoints.resume(initial_state(setup))
        first = len(log.losses)
        throughput = Throughput(setup.placement.mesh.size, setup.placement.device.device_kind)
        monitored = MeanLoss(setup, rows.monitored) if recipe.eval_every else None
        steps = TrainingSteps(setup, state, order, plan, checkpoints, monitored, say)
        config = recipe.model_dump(mode="json")
        with (
            open_trackers(
                recipe.trackers, folder, step=first, name=recipe.name, config=config, trainer=TRAINER
            ) as trackers,
            Preemption() as preemption,
            bar("train", recipe.steps) as advance,
        ):
            ended = run_steps(
                recipe, steps, log, throughput, track=trackers.log, preemption=preemption, advance=advance
            )
        self.trained, at = steps.state.trained, ended.done
        if recipe.keep_best and (best := best_step(ended.log.evals, checkpoints.steps())) not in (None, at):
            self.trained, at = checkpoints.load(self.trained, best), best
        return Trained(
            step=at,
            log=ended.log,
            fresh_steps=ended.done - first,
            fresh_seconds=ended.seconds,
            plan=plan,
            supervised_tokens=sum(sum(row.loss) for batch in order[: ended.done] for row in batch),
            rates=throughput.rates(),
            device={"compilations": steps.programs.count},
        )

    def export(self, rows: RunRows, after: Evaluation, folder: Path, say: Say) -> dict[str, str]:
        """Write the adapter and the merged model, or all weights, and verify them with plain PyTorch.

        Raises:
            CheckFailed: what was written computes other logits than what was trained.
        """
        setup, base, merged = self.setup, self.setup.model.path, folder / "merged"
        # A bfloat16 base is written in bfloat16, whatever its float32 weights compute.
        golden = probe(setup, as_stored(setup, self.trained) if setup.full else self.trained, rows.train[0])
        dtype = getattr(torch, str(setup.program.dtype))
        with plain_torch():
            if setup.full:
                export_full(base, sources(setup, self.trained), merged)
                write_json(folder / "probe.json", golden)
                worst = verify_model(merged, golden, dtype)
                say(f"exported {merged}: plain transformers computes the same logits, largest difference {worst:.2g}")
                return {"merged": str(merged)}
            adapter = folder / "adapter"
            card = model_card(
                setup.recipe, setup.model.id, self.device(), after, versions(*LIBRARIES), trainer="JAX through torchax"
            )
            tensors = peft_tensors(self.trained)
            module: Any = setup.program.model.module
            export_adapter(module, tensors, adapter, self._metadata, golden, card)
            worst = verify_adapter(base, adapter, golden, dtype)
            say(f"exported {adapter}: plain PEFT computes the same logits, largest difference {worst:.2g}")
        export_merged(base, adapter, merged)
        say(f"exported {merged}, verified against base and adapter")
        return {"adapter": str(adapter), "merged": str(merged)}


def describe_run(setup: Setup, order: BatchOrder) -> dict[str, Any]:
    """Metadata of every checkpoint of a run."""
    return planned_metadata(
        setup.recipe,
        setup.model,
        setup.config,
        setup.leaves,
        prefix=module_prefix(base_of(setup.program.model.module)),
        token_ids=setup.token_ids,
        versions=versions(*LIBRARIES),
        data_digest=order.digest(),
    )
