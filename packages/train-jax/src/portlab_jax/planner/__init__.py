"""Plan a run before renting a TPU: the real step, compiled by the real TPU compiler, on any Linux machine.

Read it from `training` (which program), `program` (what is read off it), `costs` and `buffers` (how that is counted),
`estimate` (how long, how much), `analytic` and `search` (what else to try), to `runs` and `cli`.
"""
