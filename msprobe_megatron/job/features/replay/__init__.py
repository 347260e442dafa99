"""Section `replay`: recorded inputs fed to a model again."""
