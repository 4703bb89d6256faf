"""Models that the coach can ask.

protocol.py     `Backend` and `Answer`
endpoint.py     an OpenAI-compatible server; wire.py: its messages
folder.py       a model folder, run by transformers in this process (extra `folder`)
"""

from fitnesscoach.backends.protocol import Answer, Backend, BackendError, OnText, discard

__all__ = ["Answer", "Backend", "BackendError", "OnText", "discard"]
