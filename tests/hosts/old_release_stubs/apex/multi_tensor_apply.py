"""Calls an operation of `amp_C` on lists of tensors."""


def multi_tensor_applier(operation, overflow, lists, *args):
    return operation(overflow, lists, *args)
