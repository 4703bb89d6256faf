"""The public configurations in packages/port/tests/configs, and what is told beside each."""

from pathlib import Path

from portlab_port.build import Answers

TESTS = Path(__file__).parents[2] / "packages/port/tests"
CONFIGS, REPORTS = TESTS / "configs", TESTS / "reports"


def config(name: str) -> str:
    """The text of a configuration; scripts lie there as text, as they are read and never run."""
    file = CONFIGS / name
    return (file if file.exists() else CONFIGS / f"{name}.txt").read_text()


CASES: dict[str, tuple[int | None, Answers]] = {
    "trl_sft.yaml": (2, Answers(rows=15011)),
    "handbook_gemma_full.yaml": (8, Answers(rows=9500, accept=frozenset({"chat_template"}))),
    "axolotl_gemma3_qlora.yml": (None, Answers(rows=20000, examples_per_row=3.5)),
    "axolotl_gemma3_4b_lora.yml": (2, Answers(rows=4950)),
    "llama_factory_gemma3.yaml": (4, Answers(rows=10000, data="alpaca.jsonl")),
    "unsloth_studio.yaml": (None, Answers()),
    "unsloth_gemma3_270m.py": (None, Answers()),
    "unsloth_functiongemma.py": (None, Answers()),
    "gemma_qlora_guide.py": (
        None, Answers(rows=10000, examples_per_row=4, accept=frozenset({"modules_to_save"})),
    ),
    "fsdp_fitness.py": (8, Answers(rows=149)),
    "transformers_fp16.py": (None, Answers()),
    "accelerate_sft.sh": (None, Answers()),
}  # fmt: skip
