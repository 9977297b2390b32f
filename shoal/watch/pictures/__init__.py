"""Pictures of runs: curves of metrics and held-out results, drawn by matplotlib.

`curves` decides what is drawn and knows nothing of drawing; `draw` makes PNG and SVG of it.
"""
