"""shoal: reinforcement learning of language models on computers that do not trust each other."""

__version__ = "0.1.0"
