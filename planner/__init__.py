"""Quality-aware precision planning: numbers in, plan out. NumPy only; no JAX, no devices, no clock.

tables      BlockTable: damage and pages of every block at every width; what calibration hands over
kinds       TextKinds: damage in each of calibration's texts, and which of them the running text is like
residual    ResidualHeads: how much more a prompt hurts than calibration text
damage      Prices, price: sensitivity, routing and residual joined into the damage of now
plan        Plan, Change, PlanStatus: what comes out
explain     find_block, explain_block: why a block has its bits
hull, exact the two halves of the solver: steps along convex hulls, and what closes the gap to the optimum
solve       demote, promote, fit, uniform: which blocks to move
floors      FloorRule: how low each block may go, relaxed in stages
pressure    Thresholds, Pressure, measure: how many pages to release, or to spend
observe     Observation, Policy, Trigger: what a policy sees and answers, and when it acts
default, paper, baselines    the policies
policy      get_policy, POLICIES: policies by name
"""

from planner.damage import Prices as Prices
from planner.damage import price as price
from planner.explain import find_block as find_block
from planner.floors import FloorRule as FloorRule
from planner.kinds import TextKinds as TextKinds
from planner.observe import Observation as Observation
from planner.observe import Policy as Policy
from planner.plan import Change as Change
from planner.plan import Plan as Plan
from planner.plan import PlanStatus as PlanStatus
from planner.policy import POLICIES as POLICIES
from planner.policy import get_policy as get_policy
from planner.pressure import Pressure as Pressure
from planner.pressure import Thresholds as Thresholds
from planner.pressure import measure as measure
from planner.residual import MomentsReference as MomentsReference
from planner.residual import ResidualHeads as ResidualHeads
from planner.solve import demote as demote
from planner.solve import fit as fit
from planner.solve import next_demotion as next_demotion
from planner.solve import promote as promote
from planner.solve import uniform as uniform
from planner.tables import BlockTable as BlockTable
