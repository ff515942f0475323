"""The rules for the structure of the code: the order of rooms, one meaning for each name, nothing too long.

`python -m tests.house` prints all of it; `make check` fails when a rule is broken (tests/unit/test_house.py).
"""
