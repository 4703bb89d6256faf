"""Tool-call metrics: defined, counted, and with intervals. docs/metrics.md is the same for readers of results.

Shares of examples (`hits` of `count` have the property; a metric for which no example counts is left out):

call_exact
    Well formed, and the expected calls in the same order: equal names, equal arguments. Arguments are compared
    as JSON with strict types: `1`, `1.0`, `true` and `"1"` all differ; the order of keys is free.
name_accuracy
    Well formed, and the same names in the same order.
parse_rate
    Well formed: the strict parser of the format accepts the whole output.
hallucinated_tool_rate
    A name that the conversation does not offer occurs anywhere in the output, well formed or not.
stopped_rate
    The output ended with a stop token, not at the length limit.
schema_valid_rate
    Well formed, and every call is to an offered tool with arguments valid under its schema. An output
    without calls is valid only where none is expected.
call_exact_unordered
    As `call_exact`, with the calls in any order.
args_exact
    `call_exact_unordered` of the examples that expect a call: the strict twin of `args_ast`.
args_ast
    Of the examples that expect a call: right under the rules of BFCL, see `ast_match`.
over_call, under_call
    More, or fewer, calls than expected, malformed ones included.
irrelevance_accuracy
    Of the examples that expect no call: well formed and without any call.
relevance_accuracy
    Of the examples that expect a call: well formed and with a call, whichever.
format_leak_rate
    What reaches the user as text holds a control token or the head of a call.
most_frequent_tool
    The baseline: `name_accuracy` of always giving the names that are most frequent in the training split
    (ties: the first in alphabetical order).

Shares of calls:

hallucinated_call_rate
    Of all names in call position, malformed calls included: not offered.
unknown_arg_rate, missing_required_rate
    Of the well-formed calls to offered tools: an argument that the tool does not declare; no value for a required
    one.

With the lenient parse in the predictions, those that depend on the parser come a second time, with `_lenient`
behind the name: an output is then usable if the lenient parser accepts it or finds a call in it.
"""

from portlab_spec.metrics.ast_match import Accepted, accepted_calls, accepts, match_calls, refusal
from portlab_spec.metrics.intervals import BOOTSTRAP_SEED, CONFIDENCE, RESAMPLES, Metric, metric, ratio
from portlab_spec.metrics.judge import accepted_of, judge
from portlab_spec.metrics.records import ExampleScore, Prediction
from portlab_spec.metrics.score import MALFORMED, NO_CALL, Confusion, confusion, per_example, score

__all__ = [
    "BOOTSTRAP_SEED",
    "CONFIDENCE",
    "MALFORMED",
    "NO_CALL",
    "RESAMPLES",
    "Accepted",
    "Confusion",
    "ExampleScore",
    "Metric",
    "Prediction",
    "accepted_calls",
    "accepted_of",
    "accepts",
    "confusion",
    "judge",
    "match_calls",
    "metric",
    "per_example",
    "ratio",
    "refusal",
    "score",
]
