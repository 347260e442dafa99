"""The real one sends torch.cuda to the device and makes it claim to be there. With the simulated device so does this
one; else torch.npu already is torch.cuda.
"""

import torch

from msprobe_megatron.hosts.rehearsal import simulated_device

if simulated_device.installed():
    from msprobe_megatron.hosts.rehearsal.simulated_device import transfer

    transfer.apply()
else:
    setattr(torch.cuda, "is_available", lambda: True)  # noqa: B010  (torch is typed)
