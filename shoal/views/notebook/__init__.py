"""Data of a run for notebooks: tables as data frames, single rollouts, and what the weights say of their tokens."""
