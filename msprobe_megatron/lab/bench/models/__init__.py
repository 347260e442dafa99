"""What is measured: models, layouts, synthetic run directories."""
