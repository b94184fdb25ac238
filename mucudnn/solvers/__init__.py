"""Choosing divisions: for one problem (reuse), for a whole model (sharing); pure arithmetic."""

from mucudnn.solvers.dynamic import ReuseTable, best_of, least_workspace_bytes, solve_reuse
from mucudnn.solvers.front import division_front, pareto
from mucudnn.solvers.ilp import solve_sharing

__all__ = [
    "ReuseTable",
    "best_of",
    "division_front",
    "least_workspace_bytes",
    "pareto",
    "solve_reuse",
    "solve_sharing",
]
