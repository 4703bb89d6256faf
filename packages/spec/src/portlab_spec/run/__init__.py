"""What a training run is, whichever trainer does it: its folder, data, stages, log, metadata and outcome.

A trainer brings what depends on its framework: weights, the step, checkpoints, decoding. The rest is here, so that
runs of any of them look, read and end alike.
"""
