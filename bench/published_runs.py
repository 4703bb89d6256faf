"""Training runs of Gemma that others published with everything an estimate needs: model, chips, batch, length, seconds.

Collected in November 2026 from github.com/AI-Hypercomputer/tpu-recipes (MaxText, by Google) and arXiv:2605.25645
(Tunix), which are all that were found with a date; NVIDIA's training tables of the same month hold no Gemma. Each run
states when it was made and what it does that our step of the same size does not.
"""

from dataclasses import dataclass

from portlab_spec.recipe import Lora, Mesh, Recipe

_RECIPES = "https://github.com/AI-Hypercomputer/tpu-recipes"
_IRONWOOD = f"{_RECIPES}/blob/0797d9cebfdde7ef9c54666369be5864ca081613/training/ironwood/README.md"
_JUNE = f"runs of 2026-06-04 ({_RECIPES}/pull/257)"


@dataclass(frozen=True, kw_only=True)
class PublishedRun:
    """A run and what was published about it.

    Attributes:
        name: for tables.
        model: as a recipe names it.
        slice: Cloud name.
        rows, length: of a step over all chips; tokens of a row, all of them computed.
        mesh: ours that splits weights and rows as the run did.
        remat: ours that is closest.
        chunk: token positions whose logits a device holds at a time, as in the run.
        seconds: of a step.
        tflops_per_chip: TFLOP/s by the publisher's formula; None if none is given.
        trainer: program and version.
        dated: when it ran or was published.
        source: where it stands.
        differs: from our step of this size.
        step_time: whether the seconds are a step's own; otherwise the whole run's divided by its steps, which no
            calibration should take for a step.
        accumulate: parts of a batch, one after the other.
        lora: the adapters; None if all weights are trained.
    """

    name: str
    model: str
    slice: str
    rows: int
    length: int
    mesh: tuple[int, int, int]
    remat: str
    chunk: int
    seconds: float
    tflops_per_chip: float | None
    trainer: str
    dated: str
    source: str
    differs: str
    step_time: bool = True
    accumulate: int = 1
    lora: Lora | None = None

    def recipe(self) -> Recipe:
        """Our recipe of the same step: every row in a packed row of its own, every token a target."""
        data, fsdp, tp = self.mesh
        return Recipe.model_validate(
            {
                "name": self.name,
                "model": self.model,
                "method": "lora" if self.lora else "full",
                "lora": self.lora or Lora(),
                "mesh": Mesh(data=data, fsdp=fsdp, tp=tp),
                "remat": self.remat,
                "batch_size": self.rows,
                "accumulate": self.accumulate,
                "max_length": self.length,
                "chunk": self.chunk,
                "share_prefix": False,
                "pack": False,
            }
        )


RUNS = (
    PublishedRun(
        name="Gemma 3 12B, v6e-256",
        model="google/gemma-3-12b",
        slice="v6e-256",
        rows=256,
        length=32768,
        mesh=(1, 256, 1),
        remat="block",
        chunk=2048,  # num_vocab_tiling=16
        seconds=7.318,
        tflops_per_chip=349.442,
        trainer="MaxText tpu-recipes-v0.1.5, jax 0.7.0",
        dated=f"2025-10-18 ({_RECIPES}/pull/100)",
        source=f"{_RECIPES}/blob/f8456e2810329f5de304fb72390f1865201bee27/training/trillium/Gemma3-12B-MaxText/v6e-256",
        differs="attention blocks tuned by hand (1024, 2048)",
    ),
    PublishedRun(
        name="Gemma 4 E2B, 64 TPU7x",
        model="google/gemma-4-E2B",
        slice="tpu7x-128",
        rows=256,
        length=8192,
        mesh=(4, 32, 1),
        remat="block",
        chunk=2048,  # num_vocab_tiling=8
        seconds=0.5662,  # printed as 0.57; from the tokens per second, which have more digits
        tflops_per_chip=892.84,
        trainer="MaxText df1b359",
        dated=_JUNE,
        source=_IRONWOOD,
        differs="layers unrolled; attention blocks tuned; collectives on SparseCores",
    ),
    PublishedRun(
        name="Gemma 4 E4B, 64 TPU7x",
        model="google/gemma-4-E4B",
        slice="tpu7x-128",
        rows=256,
        length=8192,
        mesh=(4, 32, 1),
        remat="block",
        chunk=2048,
        seconds=0.9708,
        tflops_per_chip=1002.50,
        trainer="MaxText df1b359",
        dated=_JUNE,
        source=_IRONWOOD,
        differs="layers unrolled; attention blocks tuned; collectives on SparseCores",
    ),
    PublishedRun(
        name="Gemma 4 26B-A4B, 64 TPU7x",
        model="google/gemma-4-26B-A4B",
        slice="tpu7x-128",
        rows=2048,
        length=4096,
        mesh=(1, 128, 1),
        remat="block",
        chunk=8192,  # num_vocab_tiling=1 in the newest script, 8 in the one before
        seconds=5.529,
        tflops_per_chip=593.59,
        trainer="MaxText df1b359",
        dated=_JUNE,
        source=_IRONWOOD,
        differs="layer inputs wait in host memory; grouped products of megablox with tuned tiles",
    ),
    PublishedRun(
        name="Gemma 4 26B-A4B, 256 TPU7x",
        model="google/gemma-4-26B-A4B",
        slice="tpu7x-512",
        rows=8192,
        length=4096,
        mesh=(2, 256, 1),
        remat="block",
        chunk=8192,
        seconds=5.540,
        tflops_per_chip=592.41,
        trainer="MaxText df1b359",
        dated=_JUNE,
        source=_IRONWOOD,
        differs="grouped products of megablox with tuned tiles",
    ),
    PublishedRun(
        name="Gemma 4 31B, 64 TPU7x",
        model="google/gemma-4-31B",
        slice="tpu7x-128",
        rows=512,
        length=8192,
        mesh=(1, 128, 1),
        remat="block",
        chunk=4096,  # num_vocab_tiling=8
        seconds=12.202,
        tflops_per_chip=1057.76,
        trainer="MaxText df1b359",
        dated=_JUNE,
        source=_IRONWOOD,
        differs="keeps the outputs of o_proj and down_proj, which ours computes again; weights gathered in two stages",
    ),
    PublishedRun(
        name="Gemma 4 31B LoRA, v5p-8",
        model="google/gemma-4-31B",
        slice="v5p-8",
        rows=8,
        length=3072,
        mesh=(1, 1, 4),
        remat="block",
        chunk=3072,
        seconds=3.34 * 3600 / 1244,
        tflops_per_chip=None,
        trainer="Tunix and Qwix, from source",
        dated="2026-05-25 (arXiv:2605.25645)",
        source="https://github.com/h2loop/gemma-tpu (paper/technical_paper.tex, training/gemma4_lora_sft.py)",
        differs="wall clock of 1244 steps with loading, compiling and 12 checkpoints; attention without a kernel; the "
        "paper says length 4096, the script and the number of steps 3072",
        step_time=False,
        accumulate=8,
        lora=Lora(rank=64, alpha=64.0, dropout=0.05, train_control_rows=False),
    ),
)

# Several slices over the data-centre network, which the planner does not model: one slice's bound is theirs too.
OUT_OF_SCOPE = (
    {"name": "Gemma 3 12B, 2 x v6e-256", "seconds": 7.793, "tflops_per_chip": 328.139, "like": "Gemma 3 12B, v6e-256"},
    {"name": "Gemma 3 12B, 4 x v6e-256", "seconds": 8.390, "tflops_per_chip": 304.788, "like": "Gemma 3 12B, v6e-256"},
)
