"""The measurements: pure functions of tensors whose first axis is examples; all other axes are flattened.

Everything is computed in float64 and holds at any norm that float64 can hold. What cannot be computed is NaN. Nothing
draws from the global random stream. Credits and gradients are per example, of the sum-reduced loss.
"""
