"""A job on a machine that lacks the accelerator it was written for: the script of an untouched recipe, trained small
on CPU with stand-ins for the packages that need the device.

`launching.rehearsal` rewrites the recipe's command line and sends its script here; this room runs inside the training
processes, in front of `msprobe_megatron.run`. Nothing of it is imported by any other job.

    torchrun ... -m msprobe_megatron.rehearsal pretrain_gpt.py ... --msprobe-config probe.yaml
"""
