"""The rules of the house, and who keeps them: the order of rooms, one name for one thing, nothing too long.

`python -m tests.house` shows it all; `make check` holds it (tests/unit/test_house.py).
"""
