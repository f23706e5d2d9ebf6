"""Set-up of every test run: one thread, and property tests that draw the same examples every time."""

import torch
from hypothesis import HealthCheck, settings

torch.set_num_threads(1)

settings.register_profile("foveate", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("foveate")
