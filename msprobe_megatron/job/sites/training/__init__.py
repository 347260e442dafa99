"""The training loop: gradients, optimizer steps and states, losses, metrics, progress, checkpoints."""
