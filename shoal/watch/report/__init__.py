"""A report on a run: one HTML file without scripts that opens without a network, to send to somebody.

`facts` reads what it says, `samples` picks conversations, `page` writes the file.
"""
