"""Choosing divisions: for one problem (reuse), for a whole model (sharing); pure arithmetic."""

from mucudnn.solvers.dynamic import ReuseTable, least_workspace_bytes, solve_reuse
from mucudnn.solvers.front import division_front, pareto
from mucudnn.solvers.ilp import solve_sharing
from mucudnn.solvers.residency import Demand, solve_network_reuse

__all__ = [
    "Demand",
    "ReuseTable",
    "division_front",
    "least_workspace_bytes",
    "pareto",
    "solve_network_reuse",
    "solve_reuse",
    "solve_sharing",
]
