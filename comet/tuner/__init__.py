"""Adaptive workload assignment: analytic model -> candidates -> measurement -> profile store -> choice."""
