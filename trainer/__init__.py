"""The real run: trains a scenario's model in its layout with PyTorch, and measures it."""
