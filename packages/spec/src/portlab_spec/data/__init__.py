"""Data sets as lists of `Conversation`."""
