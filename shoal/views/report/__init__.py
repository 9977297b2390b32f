"""A report on a run: one HTML file without scripts that opens without a network, to send to somebody.

`report` reads what it says and writes the file, `samples` picks conversations.
"""
