"""SmallResNet and SmallCNN: states' shapes, parameter counts, and the formulas of their blocks."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from creditscope.errors import UsageError
from creditscope.nets import SmallCNN, SmallResNet


@pytest.fixture(autouse=True)
def _seeded():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


def images(n, side=32):
    return torch.randn(n, 3, side, side, generator=torch.Generator().manual_seed(1))


def state_shapes(net, x):
    shapes = []
    for name in [*net.credit_blocks, net.credit_head]:
        net.get_submodule(name).register_forward_pre_hook(lambda _, args: shapes.append(tuple(args[0].shape[1:])))
    net(x)
    return shapes


def test_small_cnn_has_the_study_s_states():
    shapes = state_shapes(SmallCNN(), images(2))
    assert shapes == [(32, 32, 32), (64, 16, 16), (128, 8, 8), (256,)]


def test_small_cnn_is_the_study_s_layers():
    net, x = SmallCNN(image=8, width=2, hidden=5), images(3, 8)
    first, second, dense = net.blocks
    h = F.conv2d(x, net.embed.conv.weight, net.embed.conv.bias, padding=1).relu()
    h = F.max_pool2d(F.conv2d(h, first.conv.weight, first.conv.bias, padding=1).relu(), 2)
    h = F.max_pool2d(F.conv2d(h, second.conv.weight, second.conv.bias, padding=1).relu(), 2)
    h = F.linear(h.flatten(1), dense.linear.weight, dense.linear.bias).relu()
    torch.testing.assert_close(net(x), F.linear(h, net.out_head.weight, net.out_head.bias))


@pytest.mark.parametrize(("image", "batch_norm"), [(8, False), (28, True), (30, True)])
def test_small_cnn_s_parameter_count_is_the_formula(image, batch_norm):
    w, m, classes = 4, 6, 7
    net = SmallCNN(image, 3, w, m, classes, batch_norm=batch_norm)
    convolutions = 27 * w + w + 18 * w**2 + 2 * w + 72 * w**2 + 4 * w
    formula = convolutions + 4 * w * (image // 4) ** 2 * m + m + m * classes + classes + batch_norm * 14 * w
    assert sum(p.numel() for p in net.parameters()) == formula
    assert net(images(2, image)).shape == (2, 7)


def test_small_cnn_s_batch_norm_is_before_the_activation():
    net = SmallCNN(image=8, width=4, batch_norm=True)
    z = net.embed.conv(images(6, 8))
    normed = F.batch_norm(z, None, None, training=True)
    torch.testing.assert_close(net.embed(images(6, 8)), normed.relu())
    assert net.embed.bn.num_batches_tracked == 1


def test_small_cnn_refuses_an_image_that_cannot_be_halved_twice():
    with pytest.raises(UsageError, match="at least 4, not 3"):
        SmallCNN(image=3)


def test_small_resnet_s_stages_change_shape():
    shapes = state_shapes(SmallResNet(), images(2))
    assert shapes == [(16, 32, 32)] * 3 + [(32, 16, 16)] * 2 + [(64, 8, 8)] * 2


@pytest.mark.parametrize("stage_blocks", [1, 3])
@pytest.mark.parametrize("stages", [1, 3])
def test_small_resnet_s_parameter_count_is_the_formula(stages, stage_blocks):
    width, classes = 4, 7
    net = SmallResNet(8, 3, width, stages, stage_blocks, classes)
    kept, changed = (lambda c: 18 * c**2 + 4 * c), (lambda c: 14 * c**2 + 3 * c)
    widths = [width * 2**s for s in range(stages)]
    blocks = sum((stage_blocks - 1) * kept(c) for c in widths) + kept(width) + sum(changed(c) for c in widths[1:])
    formula = 27 * width + blocks + 2 * widths[-1] + (widths[-1] + 1) * classes
    assert sum(p.numel() for p in net.parameters()) == formula
    assert len(net.credit_blocks) == stages * stage_blocks


def test_small_resnet_s_blocks_are_the_formula():
    net, h = SmallResNet(width=4, stages=2).eval(), torch.randn(2, 4, 6, 6)
    kept, changed = net.blocks[0], net.blocks[2]
    for block in (kept, changed):
        z = block.bn1(h).relu()
        f = block.conv2(block.bn2(block.conv1(z)).relu())
        torch.testing.assert_close(block(h), f if block is kept else f + block.shortcut(z))


def test_small_resnet_learns_its_running_statistics_in_training_mode_alone():
    net = SmallResNet(image=8, width=4)
    net.eval()(images(2, 8))
    assert net.out_bn.num_batches_tracked == 0
    net.train()(images(2, 8))
    assert net.out_bn.num_batches_tracked == 1
