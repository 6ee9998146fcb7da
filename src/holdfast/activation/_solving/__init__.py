"""The fastest way to run a chain of stages within a budget. Pure: knows bytes and seconds, not
models."""
