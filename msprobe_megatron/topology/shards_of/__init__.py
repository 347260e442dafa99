"""How the tensors of a module, a parameter, a gradient buffer or an optimizer state are sharded."""
