"""Set-up that every test shares."""

import torch

torch.set_num_threads(1)  # the models are tiny: a second thread only waits, and on a busy machine for long
