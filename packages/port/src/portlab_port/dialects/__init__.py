"""One table per dialect: key -> neutral name, and the defaults of what a dialect's files leave out.

Keys are those of TRL 1.16, transformers 5.23, PEFT 0.21, and of the older releases that recipes still hold; Axolotl
0.19, LLaMA-Factory 0.9, Unsloth 2026.
"""

from portlab_port.dialects.axolotl import AXOLOTL
from portlab_port.dialects.llama_factory import LLAMA_FACTORY
from portlab_port.dialects.table import Dialect
from portlab_port.dialects.trl import TRL
from portlab_port.dialects.unsloth import UNSLOTH

DIALECTS: dict[str, Dialect] = {dialect.style: dialect for dialect in (TRL, AXOLOTL, LLAMA_FACTORY, UNSLOTH)}
