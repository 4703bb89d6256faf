"""Tools: declared from Python or read from any of the shapes in use, lowered to what Gemma's templates can render,
linted for what they cannot, and checked against the arguments of a call.
"""

from portlab_spec.tools.constraints import describe_constraints
from portlab_spec.tools.functions import JSON_TYPE_OF_SCALAR, tool_from_function, tool_from_model
from portlab_spec.tools.lint import Finding, lint, lint_tools
from portlab_spec.tools.lower import lower_schema
from portlab_spec.tools.shapes import read_tools, to_openai
from portlab_spec.tools.validate import json_type, same_json, validate_arguments

__all__ = [
    "JSON_TYPE_OF_SCALAR",
    "Finding",
    "describe_constraints",
    "json_type",
    "lint",
    "lint_tools",
    "lower_schema",
    "read_tools",
    "same_json",
    "to_openai",
    "tool_from_function",
    "tool_from_model",
    "validate_arguments",
]
