"""What the serving bench asks: text of two kinds, or token ids of a given length."""

from __future__ import annotations

LONG = (
    "Explain general relativity to a physics student: the equivalence principle, curvature, the"
    " field equations, and three experimental tests.",
    "Describe how to solve the N-queens problem by backtracking, analyse its cost, and compare it"
    " with a constraint solver.",
    "Compare TCP and UDP in depth: connection set-up, ordering, congestion control, and when each"
    " is the right choice.",
    "Explain photosynthesis step by step, from light capture to the Calvin cycle, with the energy"
    " balance of each step.",
    "Prove in several ways that there are infinitely many primes, and discuss what each proof"
    " teaches.",
)
CODE = (
    "Write a Python class for an LRU cache with a time limit per entry, with type annotations and"
    " unit tests.",
    "Write a C function that parses a CSV line with quoted fields, and explain its edge cases.",
    "Write a SQL query that finds each customer's longest run of consecutive days with an order.",
)
SETS = {"long": LONG, "code": CODE}


def token_prompt(length: int, request: int, vocabulary: int) -> list[int]:
    """Token ids without a period shorter than the vocabulary, different for each request."""
    span = vocabulary - 16
    return [(7919 * (i + 1) + 104729 * request) % span + 8 for i in range(length)]
