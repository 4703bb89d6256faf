"""A logits processor for vLLM that makes a request answer with given tokens: parsers are then tested over HTTP.

`--logits-processors serving.forced_output:ForcedOutput`, and in a request `"vllm_xargs": {"forced": [ids]}`. Sampling,
detokenising, streaming and parsing are the server's own; only what the model would have said is replaced.
"""

from collections.abc import Callable
from typing import Any

import torch
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor


class ForcedOutput(AdapterLogitsProcessor):
    """Leaves one token possible at each step of a request that names its output."""

    def is_argmax_invariant(self) -> bool:
        """No: greedy sampling must see it."""
        return False

    def new_req_logits_processor(self, params: Any) -> Callable[[list[int], torch.Tensor], torch.Tensor] | None:
        """The processor of a request, None for one that is left to the model."""
        forced = (params.extra_args or {}).get("forced")
        if not forced:
            return None

        def only_the_next(output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
            wanted = int(forced[min(len(output_ids), len(forced) - 1)])
            logits.fill_(float("-inf"))
            logits[wanted] = 0.0
            return logits

        return only_the_next
