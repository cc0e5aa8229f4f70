"""Fine-tuning of chosen entries of a model."""
