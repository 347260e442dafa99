"""The real one sends torch.cuda to the device and makes it claim to be there; torch.npu already is torch.cuda here."""

import torch

setattr(torch.cuda, "is_available", lambda: True)  # noqa: B010  (torch is typed)
