"""What every registered network must do: the conformance of ``creditscope.nets``."""

from __future__ import annotations

import inspect
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from creditscope import nets
from creditscope.errors import UsageError

KEYS = [entry.key for entry in nets.REGISTRY]
DEFAULT_COUNTS = {
    "resmlp": 1_318_154,
    "mlp": 2_366_474,
    "vit": 546_186,
    "small-resnet": 175_066,
    "small-cnn": 2_193_226,
    "student": 75_658,
}
# Small sizes that still have every part: two blocks or more, two stages, several heads and tokens.
SMALL = {
    "resmlp": {"inputs": 12, "width": 8, "depth": 3, "classes": 4},
    "mlp": {"inputs": 12, "width": 8, "depth": 3, "classes": 4},
    "vit": {"image": 8, "width": 8, "depth": 2, "heads": 2, "classes": 4},
    "small-resnet": {"image": 8, "width": 4, "stages": 2, "classes": 4},
    "small-cnn": {"image": 8, "width": 4, "hidden": 8, "classes": 4},
    "student": {"inputs": 12, "width": 8, "depth": 3, "classes": 4},
}
WITH_SKIPS = {"resmlp", "vit", "small-resnet", "student"}


def make(key, seed=0, **options):
    torch.manual_seed(seed)
    return nets.REGISTRY.load(key)(**SMALL[key] | options)


def batch(net, n=6, seed=1):
    generator = torch.Generator().manual_seed(seed)
    example = net.example()
    return torch.randn(n, *example.shape[1:], generator=generator).to(example.dtype)


def parameter_count(net):
    return sum(parameter.numel() for parameter in net.parameters())


@pytest.fixture(autouse=True)
def _restored_global_rng():
    with torch.random.fork_rng(devices=[]):
        yield


def test_reading_the_registry_loads_no_torch():
    code = (
        "import sys; from creditscope.nets import REGISTRY; print(*[e.key for e in REGISTRY], 'torch' in sys.modules)"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert said.split() == [*KEYS, "False"]


def test_exports_are_the_registered_classes():
    assert set(nets.REGISTRY.exports()) < set(nets.__all__)
    assert all(hasattr(nets, name) for name in nets.__all__)
    assert nets.ResMLP is nets.REGISTRY.load("resmlp")
    with pytest.raises(AttributeError):
        nets.ResMPL  # noqa: B018


@pytest.mark.parametrize("key", KEYS)
def test_default_size_has_the_documented_number_of_parameters(key):
    kind = nets.REGISTRY.load(key)
    with torch.device("meta"):
        count = parameter_count(kind())
    assert count == DEFAULT_COUNTS[key]
    assert f"{count:,} parameters" in kind.__doc__
    row = next(line for line in documentation().splitlines() if line.startswith(f"| `{key}`"))
    assert f" {count:,} " in row


def documentation():
    return (Path(__file__).parents[2] / "docs" / "networks.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("key", KEYS)
def test_every_argument_has_a_plain_type_and_a_default(key):
    kind = nets.REGISTRY.load(key)
    for parameter in inspect.signature(kind, eval_str=True).parameters.values():
        assert parameter.default is not parameter.empty
        literal = getattr(parameter.annotation, "__args__", ())
        assert parameter.annotation in (int, float, bool, str) or all(isinstance(value, str) for value in literal)
        assert literal or isinstance(parameter.default, parameter.annotation)
    assert set(kind.settled_by_data) <= set(inspect.signature(kind).parameters)


@pytest.mark.parametrize("key", KEYS)
def test_named_blocks_and_head_are_called_once_in_order(key):
    net = make(key)
    called = []
    for name in [*net.credit_blocks, net.credit_head]:
        net.get_submodule(name).register_forward_pre_hook(lambda *_, name=name: called.append(name))
    net(batch(net))
    assert called == [*net.credit_blocks, net.credit_head]
    assert len(net.credit_blocks) >= 2


@pytest.mark.parametrize("key", KEYS)
def test_block_outputs_add_up_to_the_next_states(key):
    """What enters a block is the state before plus the branch, or the block's own output where there is no skip."""
    net = make(key).double()
    seen = []
    for name in [*net.credit_blocks, net.credit_head]:
        net.get_submodule(name).register_forward_hook(lambda _, args, output: seen.append((args[0], output)))
    net(batch(net))
    for (before, output), (after, _) in pairwise(seen):
        if before.shape == after.shape and key in WITH_SKIPS:
            assert torch.equal(after, before + output)
        else:
            assert after is output


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_forward_in_every_precision(key, dtype):
    net = make(key).to(dtype)
    assert net.example().dtype == dtype
    assert torch.equal(net.example(), torch.zeros(2, *net.input_shape, dtype=dtype))
    logits = net(batch(net))
    assert logits.shape == (6, 4)
    assert logits.dtype == dtype
    assert logits.isfinite().all()


@pytest.mark.parametrize("key", KEYS)
def test_precisions_agree(key):
    net = make(key)
    exact = net.double()(batch(net))
    torch.testing.assert_close(net.float()(batch(net)).double(), exact, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("key", KEYS)
def test_every_parameter_gets_a_gradient(key):
    net = make(key)
    F.cross_entropy(net(batch(net)), torch.tensor([0, 1, 2, 3, 0, 1])).backward()
    dead = [name for name, parameter in net.named_parameters() if parameter.grad is None or not parameter.grad.any()]
    assert dead == []


@pytest.mark.parametrize("key", KEYS)
def test_gradient_is_the_derivative(key):
    """Finite differences in float64: no layer hides a rule's signal in its own backward."""
    net = make(key).double().eval()
    x, direction = batch(net), batch(net, seed=2)
    x.requires_grad_()
    (gradient,) = torch.autograd.grad(net(x).logsumexp(1).sum(), x)
    with torch.no_grad():
        ahead, behind = (net(x + step * direction).logsumexp(1).sum() for step in (1e-6, -1e-6))
    torch.testing.assert_close((gradient * direction).sum(), (ahead - behind) / 2e-6, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("key", KEYS)
def test_same_seed_same_bits_and_the_order_of_parameters_is_fixed(key):
    first, again, other = make(key), make(key), make(key, seed=1)
    assert list(first.state_dict()) == list(again.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), again.parameters(), strict=True))
    assert not torch.equal(first.out_head.weight, other.out_head.weight)


@pytest.mark.parametrize("key", KEYS)
def test_one_example_does_not_touch_another(key):
    net = make(key).double().eval()
    x = batch(net)
    torch.testing.assert_close(net(x)[2:3], net(x[2:3]), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 32, 32), (1, 28, 28)])
def test_sized_from_image_data(key, shape):
    net = nets.REGISTRY.load(key).from_data(shape, 7, width=8)
    x = torch.randn(2, *shape, generator=torch.Generator().manual_seed(0))
    assert net(x).shape == (2, 7)
    assert net.example().numel() == x.numel()


@pytest.mark.parametrize("key", ["resmlp", "mlp", "student"])
def test_sized_from_vectors_and_flattens_images(key):
    net = nets.REGISTRY.load(key).from_data((48,), 7, width=8)
    images = torch.randn(2, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    assert torch.equal(net(images), net(images.reshape(2, 48)))


@pytest.mark.parametrize("key", ["vit", "small-resnet", "small-cnn"])
@pytest.mark.parametrize("shape", [(48,), (3, 8, 16)])
def test_image_networks_refuse_what_is_not_a_square_image(key, shape):
    with pytest.raises(UsageError, match="takes square images"):
        nets.REGISTRY.load(key).from_data(shape, 7)


@pytest.mark.parametrize("key", KEYS)
def test_wrong_input_shape_is_named(key):
    net = make(key)
    with pytest.raises(
        UsageError, match=rf"{type(net).__name__} takes batches of \({net.input_shape[0]}, ?.*\), not of"
    ):
        net(torch.zeros(2, *net.input_shape[:-1], net.input_shape[-1] + 1))
    with pytest.raises(UsageError, match="not of"):
        net(torch.zeros(net.input_shape))


@pytest.mark.parametrize(
    ("key", "name"),
    [
        (key, name)
        for key in KEYS
        for name, parameter in inspect.signature(nets.REGISTRY.load(key), eval_str=True).parameters.items()
        if parameter.annotation is int
    ],
)
@pytest.mark.parametrize("size", [0, -1, 2.5])
def test_bad_sizes_are_refused_in_one_line(key, name, size):
    with pytest.raises(UsageError, match=f"^{name} must be a whole number of at least 1, not {size}$"):
        make(key, **{name: size})


@pytest.mark.parametrize("key", KEYS)
def test_state_dict_round_trip(key):
    first, second = make(key), make(key, seed=1)
    second.load_state_dict(first.state_dict())
    assert torch.equal(first.eval()(batch(first)), second.eval()(batch(first)))
