"""Serving what was trained: one command line, a check of the model folder, template and tool parser for vLLM."""
