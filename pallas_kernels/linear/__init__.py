"""Products with matrices of bfloat16 bits that may lie in a stack, one a layer."""

from pallas_kernels.linear.api import IMPLEMENTATIONS as IMPLEMENTATIONS
from pallas_kernels.linear.api import linear as linear
from pallas_kernels.linear.api import problems as problems
from pallas_kernels.linear.reference import Member as Member
from pallas_kernels.linear.reference import widen as widen
