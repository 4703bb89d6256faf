"""What the stock stack does under SPMD on four devices: first the step alone, then FSDPv2, which imports torchax."""

import steps
import torch_xla.runtime as xr
import wrapper
from observe import observe

xr.use_spmd()
observe(*steps.OBSERVATIONS, *wrapper.OBSERVATIONS)
