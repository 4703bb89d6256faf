"""The job of a benchmark as a recipe, for the trainers that take one."""

from exchange import Job

from portlab_spec.recipe import Lora, Optimizer, Recipe


def recipe_of(job: Job, name: str, *, packed: bool) -> Recipe:
    """The recipe that asks for what the job does.

    Args:
        job: what all contenders do.
        name: of the contender.
        packed: whether rows share what they start with and stand side by side; else each is a row of its own.
    """
    settings, rows = job.settings, len(job.batches[0])
    return Recipe(
        model=settings.model,
        steps=len(job.batches),
        batch_size=rows,
        accumulate=rows // settings.micro_batch[name],
        max_length=max(job.longest, 8),
        share_prefix=packed,
        pack=packed,
        dtype="float32" if settings.dtype == "float32" else "bfloat16",
        remat="block" if settings.device == "cuda" else "none",
        lora=Lora(rank=settings.rank, alpha=settings.alpha, targets=settings.targets, train_control_rows=False),
        optimizer=optimizer_of(job),
    )


def optimizer_of(job: Job) -> Optimizer:
    """The recipe's section for the job's AdamW at a constant rate."""
    settings = job.settings
    return Optimizer(
        learning_rate=settings.learning_rate,
        warmup_steps=0,
        schedule="constant",
        b1=settings.b1,
        b2=settings.b2,
        eps=settings.eps,
        weight_decay=settings.weight_decay,
        clip_norm=settings.clip_norm,
    )
