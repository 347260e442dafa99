"""Another implementation of the same model (Hugging Face, an engine), brought to Megatron's names and forms."""
