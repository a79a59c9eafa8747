"""Settings of the whole suite."""

import torch

# The inputs are tiny: threads would only wait for each other. Set before any test, for all of them.
torch.set_num_threads(1)
