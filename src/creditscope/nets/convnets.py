"""SmallResNet and SmallCNN: convolutional networks whose states change shape along the way."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from creditscope.errors import UsageError
from creditscope.nets._base import ImageNetwork, require_sizes


def conv3x3(inputs: int, outputs: int, *, stride: int = 1, bias: bool = False) -> nn.Conv2d:
    """Return a 3×3 convolution that keeps the image's size at stride 1."""
    return nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=bias)


class PreActivationBlock(nn.Module):
    """Pre-activation residual block of He et al. (2016, arXiv:1603.05027).

    The branch is f(h) = conv₂ ReLU(bn₂(conv₁ ReLU(bn₁(h)))). A block that keeps the shape returns the branch alone,
    and the network adds the skip. One that changes it has no identity to add: it carries its own shortcut, a strided
    1×1 convolution of ReLU(bn₁(h)), and returns the whole new state.
    """

    def __init__(self, inputs: int, outputs: int, stride: int):
        super().__init__()
        self.keeps_shape = inputs == outputs and stride == 1
        self.bn1 = nn.BatchNorm2d(inputs)
        self.conv1 = conv3x3(inputs, outputs, stride=stride)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.conv2 = conv3x3(outputs, outputs)
        if not self.keeps_shape:
            self.shortcut = nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False)

    def forward(self, h: Tensor) -> Tensor:
        """Return the branch f(h), or the new state where the shape changes."""
        z = F.relu(self.bn1(h))
        f = self.conv2(F.relu(self.bn2(self.conv1(z))))
        return f if self.keeps_shape else self.shortcut(z) + f


class SmallResNet(ImageNetwork):
    """Residual convnet with BatchNorm: a 3×3 stem, ``stages`` of ``stage_blocks`` blocks, global mean pooling, head.

    Stage s has ``width``·2ˢ channels, and each but the first halves the image.

    ====================  ====================================================  =========================
    part                  layers                                                parameters
    ====================  ====================================================  =========================
    ``embed``             Conv2d(channels, width, 3×3)                          9·channels·width
    ``blocks.{l}``        ``bn1``, ReLU, ``conv1``, ``bn2``, ReLU, ``conv2``    18c² + 4c
    first of a stage      the same from c/2 to c channels, stride 2, and a      14c² + 3c
    but of the first      ``shortcut``, Conv2d(c/2, c, 1×1)
    ``out_bn``            BatchNorm2d, ReLU, mean over the image                2·width·2^(stages − 1)
    ``out_head``          Linear(width·2^(stages − 1), classes)                 (… + 1)·classes
    ====================  ====================================================  =========================

    The count is the sum of the table (c the channels of a block's stage), at the default sizes (channels 16, 32, 64,
    two blocks a stage, L = 6) 175,066 parameters; BatchNorm's running statistics are buffers and not counted.

    h_l is the sum before the next block's BatchNorm: h_{l+1} = h_l + f_l(h_l) within a stage, and the block's own
    output where it changes the shape. h_L enters ``out_bn``.

    The source study names a SmallResNet with BatchNorm and without LayerNorm and gives nothing else of it; this one
    follows He et al. (2016, arXiv:1603.05027), chosen because its skips are pure additions. Initialisation is
    torch's default, in the order of the table (``shortcut`` after ``conv2``).
    """

    def __init__(
        self,
        image: int = 32,
        channels: int = 3,
        width: int = 16,
        stages: int = 3,
        stage_blocks: int = 2,
        classes: int = 10,
    ):
        require_sizes(image=image, channels=channels, width=width, stages=stages)
        require_sizes(stage_blocks=stage_blocks, classes=classes)
        super().__init__()
        self.input_shape = (channels, image, image)
        widths = [width * 2**stage for stage in range(stages)]
        self.embed = conv3x3(channels, width)
        self.blocks = nn.ModuleList()
        for before, c in zip([width, *widths], widths, strict=False):
            self.blocks.append(PreActivationBlock(before, c, stride=c // before))
            self.blocks.extend(PreActivationBlock(c, c, stride=1) for _ in range(stage_blocks - 1))
        self.out_bn = nn.BatchNorm2d(widths[-1])
        self.out_head = nn.Linear(widths[-1], classes)

    @property
    def credit_head(self) -> str:
        """The module that h_L enters: the last BatchNorm."""
        return "out_bn"

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits (batch, classes)."""
        h = self.embed(self._checked(x))
        for block in self.blocks:
            h = h + block(h) if block.keeps_shape else block(h)
        return self.out_head(F.relu(self.out_bn(h)).mean((-2, -1)))


class ConvLayer(nn.Module):
    """ReLU(conv(h)), with BatchNorm before the ReLU and 2×2 max pooling after it where asked for."""

    def __init__(self, inputs: int, outputs: int, *, pool: bool, batch_norm: bool):
        super().__init__()
        self.conv = conv3x3(inputs, outputs, bias=True)
        self.bn = nn.BatchNorm2d(outputs) if batch_norm else nn.Identity()
        self.pool = nn.MaxPool2d(2) if pool else nn.Identity()

    def forward(self, h: Tensor) -> Tensor:
        """Return the layer's activations."""
        return self.pool(F.relu(self.bn(self.conv(h))))


class DenseLayer(nn.Module):
    """ReLU(W h + b) on the flattened state."""

    def __init__(self, inputs: int, outputs: int):
        super().__init__()
        self.linear = nn.Linear(inputs, outputs)

    def forward(self, h: Tensor) -> Tensor:
        """Return the layer's activations (batch, outputs)."""
        return F.relu(self.linear(h.flatten(1)))


class SmallCNN(ImageNetwork):
    """Three convolutions and two dense layers, no skips; a state is a layer's output after ReLU and pooling.

    ====================  ==========================================  ======================  =====================
    part                  layers                                      parameters              state (default sizes)
    ====================  ==========================================  ======================  =====================
    ``embed``             Conv2d(channels, w, 3×3), ReLU              9·channels·w + w        h_0: 32×32×32
    ``blocks.0``          Conv2d(w, 2w, 3×3), ReLU, pool 2×2          18w² + 2w               h_1: 64×16×16
    ``blocks.1``          Conv2d(2w, 4w, 3×3), ReLU, pool 2×2         72w² + 4w               h_2: 128×8×8
    ``blocks.2``          flatten, Linear(4w·(image//4)², m), ReLU    4w·(image//4)²·m + m    h_3: 256
    ``out_head``          Linear(m, classes)                          m·classes + classes
    ====================  ==========================================  ======================  =====================

    With w = ``width`` and m = ``hidden`` the count is the sum of the table, at the default sizes 2,193,226 parameters;
    ``batch_norm`` adds 14w.

    This is the SmallCNN of the source study (its blocks 0 to 3 are our stem and blocks 0 to 2). The study contradicts
    itself on normalisation: the layer list has none, the text of its audit speaks of "3 conv + BN". So
    ``batch_norm`` is an option, off by default; it stands between convolution and ReLU, and the convolutions keep
    their bias. Initialisation is torch's default, in the order of the table.
    """

    def __init__(
        self,
        image: int = 32,
        channels: int = 3,
        width: int = 32,
        hidden: int = 256,
        classes: int = 10,
        batch_norm: bool = False,
    ):
        require_sizes(image=image, channels=channels, width=width, hidden=hidden, classes=classes)
        if image < 4:
            raise UsageError(f"SmallCNN halves the image twice: its side must be at least 4, not {image}")
        super().__init__()
        self.input_shape = (channels, image, image)
        self.embed = ConvLayer(channels, width, pool=False, batch_norm=batch_norm)
        self.blocks = nn.ModuleList(
            [
                ConvLayer(width, 2 * width, pool=True, batch_norm=batch_norm),
                ConvLayer(2 * width, 4 * width, pool=True, batch_norm=batch_norm),
                DenseLayer(4 * width * (image // 4) ** 2, hidden),
            ]
        )
        self.out_head = nn.Linear(hidden, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits (batch, classes)."""
        h = self.embed(self._checked(x))
        for block in self.blocks:
            h = block(h)
        return self.out_head(h)
