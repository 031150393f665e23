"""The networks, each naming its own blocks. This page is their registry: importing it loads no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from creditscope.registry import Entry, Registry

REGISTRY = Registry(
    "net",
    [
        Entry("resmlp", "creditscope.nets.resmlp:ResMLP", "residual MLP of the source study, branches small at first"),
        Entry("mlp", "creditscope.nets.mlp:MLP", "plain MLP without skips, the textbook's network for DFA"),
        Entry("vit", "creditscope.nets.vit:ViT", "small vision transformer, pre-norm, head on the cls token"),
        Entry(
            "small-resnet", "creditscope.nets.convnets:SmallResNet", "residual convnet, BatchNorm, stages change shape"
        ),
        Entry("small-cnn", "creditscope.nets.convnets:SmallCNN", "three convolutions and a dense layer, without skips"),
        Entry("student", "creditscope.nets.student:StudentNet", "residual student, activation from linear to tanh"),
    ],
)

if TYPE_CHECKING:
    from creditscope.nets._base import ImageNetwork, Network, VectorNetwork
    from creditscope.nets.convnets import SmallCNN, SmallResNet
    from creditscope.nets.mlp import MLP
    from creditscope.nets.resmlp import ResMLP
    from creditscope.nets.student import StudentNet
    from creditscope.nets.vit import ViT

_BASE = ("ImageNetwork", "Network", "VectorNetwork")
__all__ = [
    "MLP",
    "REGISTRY",
    "ImageNetwork",
    "Network",
    "ResMLP",
    "SmallCNN",
    "SmallResNet",
    "StudentNet",
    "VectorNetwork",
    "ViT",
]


def __getattr__(name: str) -> Any:
    if name in _BASE:
        from creditscope.nets import _base

        return getattr(_base, name)
    return REGISTRY.exported(name)
