"""The page of a run: a web application that shows what an index knows, and changes nothing."""
