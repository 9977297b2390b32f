"""Pictures of runs: curves of metrics and held-out results, drawn by matplotlib.

`series` decides what is drawn and knows nothing of drawing; `render` makes PNG and SVG of it.
"""
