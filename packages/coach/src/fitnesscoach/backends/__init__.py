"""Models that the coach can ask.

protocol.py     `Backend` and `Answer`
endpoint.py     an OpenAI-compatible server; wire.py: its messages
folder.py       a model folder in this process; runtimes.py: who runs it (extra `jax` or `transformers`);
                torch_decoder.py: transformers
"""

from fitnesscoach.backends.protocol import Answer, Backend, BackendError, OnText, discard

__all__ = ["Answer", "Backend", "BackendError", "OnText", "discard"]
