"""Quality-aware precision planning: numbers in, plan out. NumPy only; no JAX, no devices, no clock.

residual    ResidualHeads: how much more a prompt hurts than calibration text
tables      BlockTable: damage and pages of every block at every width; what calibration hands over
plan        Plan, Change, PlanStatus: what comes out
solve       demote, promote, fit, uniform: which blocks to move
floors      FloorRule: how low each block may go, relaxed in stages
pressure    Thresholds, Pressure, measure: how many pages to release, or to spend
policy      Observation, Policy, get_policy, POLICIES: when to plan, and which plan
"""

from planner.floors import FloorRule as FloorRule
from planner.plan import Change as Change
from planner.plan import Plan as Plan
from planner.plan import PlanStatus as PlanStatus
from planner.policy import POLICIES as POLICIES
from planner.policy import Observation as Observation
from planner.policy import Policy as Policy
from planner.policy import get_policy as get_policy
from planner.pressure import Pressure as Pressure
from planner.pressure import Thresholds as Thresholds
from planner.pressure import measure as measure
from planner.residual import ResidualHeads as ResidualHeads
from planner.solve import demote as demote
from planner.solve import fit as fit
from planner.solve import promote as promote
from planner.solve import uniform as uniform
from planner.tables import BlockTable as BlockTable
