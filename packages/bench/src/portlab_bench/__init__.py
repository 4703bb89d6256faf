"""Speed, cost and time to first token on TPUs and GPUs: measured, compiled, published or modelled, never mixed."""
