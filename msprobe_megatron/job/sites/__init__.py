"""Where a number can be seen: hooks on modules, the optimizer's entry, the loss. They measure and decide nothing."""
