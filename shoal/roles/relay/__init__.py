"""The relay: fetches the weights of a run and serves them to others."""
