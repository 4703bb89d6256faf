"""Names of the tool parsers, for --tool-call-parser, by format."""

PARSER_NAMES = {
    name: f"portlab-{name}" for name in ("functiongemma", "gemma3-json", "gemma3-python", "gemma4", "qwen3")
}
PLUGIN = "portlab_serve.vllm_plugin"
