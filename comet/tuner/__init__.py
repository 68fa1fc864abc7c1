"""Adaptive workload assignment: analytic model -> candidates -> measurement -> profile store -> choice."""

from __future__ import annotations

from comet.tuner.candidates import propose
from comet.tuner.choice import Resolved, Resolver, check_setting, resolve
from comet.tuner.explain import Explained, explain_facts, explain_text
from comet.tuner.machine import H200, Machine
from comet.tuner.model import Prediction, predict
from comet.tuner.problem import Problem
from comet.tuner.profile import ProfileEntry, ProfileKey, ProfileStore, profile_path

__all__ = [
    "Explained",
    "H200",
    "Machine",
    "Prediction",
    "Problem",
    "ProfileEntry",
    "ProfileKey",
    "ProfileStore",
    "Resolved",
    "Resolver",
    "check_setting",
    "explain_facts",
    "explain_text",
    "predict",
    "profile_path",
    "propose",
    "resolve",
]
