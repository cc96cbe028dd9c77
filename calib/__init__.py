"""Calibration: a model and text in, quantized blocks and damage tables out. Knows no model of its own.

kmeans        nested_kmeans: deterministic weighted 1-D clusterings of all rows at once
kmeans_seed   seed_borders: the first of them, close to the optimum
kmeans_loops  what both spend their time in, in NumPy or, bit for bit the same, in C++ (kmeans_native)
anyprecision  quantize_block, dequantize: one expert matrix at every width
lut_groups    choose_lut_rows: how many rows share a table, and the page size
sensitivity   paper_damage: squared error weighted by squared gradients
refine        refine_block: tables by least squares against the inputs' second moment
packs         pack_block: matrices of any-precision-llm packs as blocks
text          windows, choose: calibration text to token windows, those chosen that reach rare experts
model         StreamedModel, Functions: what calibration needs of a model
stream        Stream: forward and backward layer by layer, activations in files (spill), resumable
rows          LayerTrace: the routed tokens of one expert, with gates and loss gradients, in tiles
blocks        importance, measure: squared gradients of an expert's weights, damage of its blocks at every width
damage        conditional_table, floors, super_additivity: tables from what was measured
residual      Samples, fit_heads, judge: how much more one sequence suffers than the average one
agreement     agreement, reliability: how well predicted damage orders and scales like measured loss
report        LayerErrors, table: relative error of every layer at every width
"""

from calib.anyprecision import QuantizedBlock as QuantizedBlock
from calib.anyprecision import dequantize as dequantize
from calib.anyprecision import quantize_block as quantize_block
from calib.kmeans import nested_kmeans as nested_kmeans
from calib.lut_groups import choose_lut_rows as choose_lut_rows
