"""Installs the emulation before any test of this folder imports megatron; ranks are forked from here."""

import os

import torch

from msprobe_megatron.job.devices import megatron_on_cpu

os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
torch.set_num_threads(1)
megatron_on_cpu.install()
