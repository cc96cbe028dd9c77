"""The bit-plane format and the compute on it: arrays in, arrays out; knows nothing of models.

pages             Geometry, BlockShape, RowLayout: how rows sit in pages
bitplanes         NumPy packing, unpacking, and the oracle of every kernel
expert_ffn        routed experts at any mix of bits
paged_attention   attention over KV pages and fresh tokens
"""
