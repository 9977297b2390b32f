"""Graders of answers, for the scores of environments: find the answer in a text, and say what it is worth.

- `extract`: the final answer in what a policy wrote: boxed, tagged, the last number, a block of code;
- `text`: accepted texts, lettered choices, regular expressions, JSON by a schema;
- `number_answers`: numbers with units and a tolerance; `math_answers`: formulas, sets, intervals, matrices;
- `programs`: programs by hidden tests, run in a sandbox;
- `llm_judge`: a language model as judge, and how good it is; `human_ratings`: people who rate answers;
- `format`: rewards for the form and the length of a text.

`grade` has what all of them take and give.
"""
