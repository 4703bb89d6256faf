"""What a model is: configuration, layers by kind, one table of parameters, LoRA targets."""

from portlab_spec.models.config import Experts, GemmaConfig, PerLayerInputs, UnsupportedModel, config_sha256
from portlab_spec.models.layers import FULL, SLIDING, LayerKind, Rope, Section, Stack
from portlab_spec.models.table import PREFIXES, Dim, Param, find_prefix, param_table
from portlab_spec.models.targets import AdapterLeaf, plan_adapter

__all__ = [
    "FULL",
    "PREFIXES",
    "SLIDING",
    "AdapterLeaf",
    "Dim",
    "Experts",
    "GemmaConfig",
    "LayerKind",
    "Param",
    "PerLayerInputs",
    "Rope",
    "Section",
    "Stack",
    "UnsupportedModel",
    "config_sha256",
    "find_prefix",
    "param_table",
    "plan_adapter",
]
