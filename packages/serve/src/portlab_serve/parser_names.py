"""Names of the tool parsers, for --tool-call-parser, by format."""

PARSER_NAMES = {
    name: f"portlab-{name}" for name in ("functiongemma", "gemma3-json", "gemma3-python", "gemma4", "qwen3")
}
# For --reasoning-parser, with Gemma 4: a tool parser cannot return what the model thought.
REASONING_PARSER = PARSER_NAMES["gemma4"]
PLUGIN = "portlab_serve.vllm_plugin"
