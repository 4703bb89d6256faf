"""What the stock training step does on XLA under SPMD, with no wrapper around the model."""

from typing import Any

import torch
import torch_xla
import torch_xla.debug.metrics as met
from datasets import Dataset
from toys import VOCAB, arguments, gemma3, one_layer, rows, tokenizer
from transformers import Gemma3ForCausalLM, Trainer, TrainerCallback
from trl import SFTConfig, SFTTrainer

PRETOKENIZED = {"dataset_kwargs": {"skip_prepare_dataset": True}}
STEPS = 4


class Reads(TrainerCallback):
    """Counts, after each step, what was compiled and what was read from the device since the start."""

    def __init__(self) -> None:
        met.clear_all()
        self.compiles: list[int] = []
        self.reads: list[int] = []

    def count(self) -> None:
        self.compiles.append((met.metric_data("CompileTime") or (0,))[0])
        self.reads.append((met.metric_data("TransferFromDeviceTime") or (0,))[0])

    def on_step_end(self, *_args: Any, **_kwargs: Any) -> None:
        self.count()

    def seen(self) -> dict[str, list[int]]:
        per_step = [after - before for before, after in zip([0, *self.reads], self.reads, strict=False)]
        return {"compiles": self.compiles, "reads_per_step": per_step}


def sft(dataset: Dataset, reads: Reads | None = None, **more: Any) -> SFTTrainer:
    return SFTTrainer(
        model=one_layer(),
        args=arguments(SFTConfig, **PRETOKENIZED, **more),
        train_dataset=dataset,
        processing_class=tokenizer(),
        callbacks=[reads] if reads else None,
    )


def reads_of_a_bare_loop() -> dict[str, Any]:
    """The same model and optimiser in a loop of ours, with the attention mask given ready-made."""
    model = one_layer().to("xla")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    ids_BT = torch.tensor(rows(4)["input_ids"]).to("xla")
    causal_BHTT = torch.ones(4, 1, 32, 32, dtype=torch.bool).tril().to("xla")
    masks = {"full_attention": causal_BHTT, "sliding_attention": causal_BHTT}
    torch_xla.sync()
    reads = Reads()
    for _ in range(STEPS):
        model(input_ids=ids_BT, labels=ids_BT, attention_mask=masks, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        torch_xla.sync()
        reads.count()
    return reads.seen()


def reads_of_the_mask() -> dict[str, Any]:
    reads = Reads()
    Trainer(model=one_layer(), args=arguments(max_steps=STEPS), train_dataset=rows(16), callbacks=[reads]).train()
    return reads.seen()


def reads_of_the_metrics() -> dict[str, Any]:
    reads = Reads()
    sft(rows(16), reads, max_steps=STEPS, logging_strategy="no").train()
    return reads.seen()


def compiles_of_new_lengths() -> dict[str, Any]:
    """Three batches, each of its own length, none of which an earlier observation compiled."""
    ids = [torch.randint(3, VOCAB, (20 + step,)).tolist() for step in range(3) for _ in range(4)]
    dataset = Dataset.from_dict({"input_ids": ids, "labels": ids})
    reads = Reads()
    sft(dataset, reads, max_steps=3, train_sampling_strategy="sequential").train()
    return reads.seen()


def gradient_checkpointing() -> dict[str, Any]:
    trainer = Trainer(model=gemma3(), args=arguments(gradient_checkpointing=True), train_dataset=rows())
    return {"steps": trainer.train().global_step}


def fused_optimizer() -> dict[str, Any]:
    trainer = Trainer(model=gemma3(), args=arguments(optim="adamw_torch_fused"), train_dataset=rows())
    return {"steps": trainer.train().global_step}


def tied_embeddings() -> dict[str, Any]:
    """A step of full fine-tuning after nothing more than a move to the device."""
    model = gemma3()
    tied_before = model.lm_head.weight is model.model.embed_tokens.weight
    model.to("xla")
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    ids_BT = torch.tensor(rows(4)["input_ids"]).to("xla")
    model(input_ids=ids_BT, labels=ids_BT, use_cache=False).loss.backward()
    optimizer.step()
    torch_xla.sync()
    model.to("cpu")
    head, embedding = model.lm_head.weight, model.model.embed_tokens.weight
    return {
        "tied_before": tied_before,
        "tied_after": head is embedding,
        "apart": (head - embedding).abs().max().item(),
        "config_says_tied": model.config.tie_word_embeddings,
    }


def rows_evaluated() -> dict[str, Any]:
    seen = {}
    for drop in (False, True):
        trainer = Trainer(model=gemma3(), args=arguments(dataloader_drop_last=drop), train_dataset=rows())
        seen["dropped" if drop else "kept"] = len(trainer.predict(rows(10)).predictions)
    return seen


def short_rows_with_a_cache() -> dict[str, Any]:
    """A row shorter than the sliding window less one."""
    return {"shape": list(forward(gemma3(), length=8).shape)}


def short_rows_without_a_cache() -> dict[str, Any]:
    return {"shape": list(forward(gemma3(), length=8, use_cache=False).shape)}


def forward(model: Gemma3ForCausalLM, length: int, **more: Any) -> torch.Tensor:
    ids_BT = torch.tensor(rows(4, length)["input_ids"]).to("xla")
    with torch.no_grad():
        return model.to("xla")(input_ids=ids_BT, **more).logits.cpu()


def masked_rows() -> dict[str, Any]:
    """Loss on the CPU and on XLA where a sliding window lies wholly within the padding."""
    ids_BT = torch.tensor(rows(2, 48)["input_ids"])
    seen = {}
    for side in ("left", "right"):
        mask_BT = torch.ones_like(ids_BT)
        padding = slice(None, 24) if side == "left" else slice(-24, None)
        mask_BT[0, padding] = 0
        batch = {"input_ids": ids_BT, "attention_mask": mask_BT, "labels": ids_BT.masked_fill(mask_BT == 0, -100)}
        for device in ("cpu", "xla"):
            model = gemma3(attn_implementation="sdpa").to(device)
            loss = model(**{name: value.to(device) for name, value in batch.items()}, use_cache=False).loss
            loss.backward()
            torch_xla.sync()
            finite = all(p.grad.isfinite().all().item() for p in model.parameters() if p.grad is not None)
            seen[f"{side}_{device}"] = {"loss": loss.item(), "finite_gradients": finite}
    return seen


OBSERVATIONS = (
    reads_of_a_bare_loop,
    reads_of_the_mask,
    reads_of_the_metrics,
    compiles_of_new_lengths,
    gradient_checkpointing,
    fused_optimizer,
    tied_embeddings,
    rows_evaluated,
    short_rows_with_a_cache,
    short_rows_without_a_cache,
    masked_rows,
)
