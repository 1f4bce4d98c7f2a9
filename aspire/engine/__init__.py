"""The engine: executes composed batches on torch."""
