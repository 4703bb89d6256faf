"""The load generator: when to send, how to read a streamed answer, and whether the client kept up."""
