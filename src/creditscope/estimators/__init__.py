"""The small networks that rules train to estimate values, states and credits."""

from __future__ import annotations

from creditscope.estimators.ema import EMA
from creditscope.estimators.networks import Activation, Architecture, Estimator, StateNet, ValueNet, VectorNet
from creditscope.estimators.time import sinusoidal

__all__ = ["EMA", "Activation", "Architecture", "Estimator", "StateNet", "ValueNet", "VectorNet", "sinusoidal"]
