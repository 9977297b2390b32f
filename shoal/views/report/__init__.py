"""A report on a run: one HTML file without scripts that opens without a network, to send to somebody.

`content` reads what it says, `samples` picks conversations, `html` writes the file.
"""
