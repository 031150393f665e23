"""Which weights get a backward matrix: every kind of map, against a twin that is built for it, and the refusals."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, prune

from creditscope.errors import UsageError
from creditscope.rules import FA
from tests.oracles import align, assert_same, backprop, left, through, untouched
from tests.test_topology import Rewired
from tests.zoo import CLASSES, TOKENS, D, Net, vectors

N = 4


def draw(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def labels(seed=0):
    return torch.randint(CLASSES, (N,), generator=torch.Generator().manual_seed(seed))


class Mean(nn.Module):
    """Flattens what comes to one row an example."""

    def forward(self, h):
        return h.flatten(2).mean(2) if h.ndim > 2 else h


def weights(learner):
    return {name.replace("/", "."): matrix for name, matrix in learner.pathway.named_buffers()}


CONVOLUTIONS = {
    "plain": (nn.Conv2d, {}),
    "no-bias": (nn.Conv2d, {"bias": False}),
    "stride": (nn.Conv2d, {"stride": 2, "padding": 1}),
    "uneven": (nn.Conv2d, {"kernel_size": (3, 2), "stride": (1, 2), "padding": (2, 0), "dilation": (1, 2)}),
    "same": (nn.Conv2d, {"padding": "same"}),
    "same-even": (nn.Conv2d, {"padding": "same", "kernel_size": (2, 4), "dilation": (1, 2)}),
    "valid": (nn.Conv2d, {"padding": "valid"}),
    "circular": (nn.Conv2d, {"padding": 1, "padding_mode": "circular"}),
    "reflect-same": (nn.Conv2d, {"padding": "same", "padding_mode": "reflect"}),
    "dilation": (nn.Conv2d, {"dilation": 2, "padding": 2}),
    "groups": (nn.Conv2d, {"groups": 2}),
    "depthwise": (nn.Conv2d, {"groups": D}),
    "one-by-one": (nn.Conv2d, {"kernel_size": 1}),
    "1d": (nn.Conv1d, {"padding": 1}),
    "1d-same": (nn.Conv1d, {"padding": "same", "dilation": 2}),
    "3d": (nn.Conv3d, {"stride": 2, "padding": 1}),
    "transposed": (nn.ConvTranspose2d, {"stride": 2, "padding": 1, "output_padding": 1}),
    "transposed-groups": (nn.ConvTranspose2d, {"groups": 2, "dilation": 2}),
    "transposed-1d": (nn.ConvTranspose1d, {"stride": 2}),
    "transposed-3d": (nn.ConvTranspose3d, {"bias": False}),
}


@pytest.mark.filterwarnings("ignore:Using padding=.same. with even kernel")
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolutions(name):
    kind, options = CONVOLUTIONS[name]
    make = lambda: kind(D, D, **({"kernel_size": 3} | options))  # noqa: E731
    axes = {"1": 1, "2": 2, "3": 3}[kind.__name__[-2]]
    net = nn.Sequential(make(), nn.Tanh(), make(), nn.Tanh(), Mean(), nn.Linear(D, CLASSES)).double()
    x, y = draw(N, D, *[9, 8, 7][:axes]), labels()
    learner = FA().attach(net, blocks=["2"], example=x)
    assert [*weights(learner)] == ["0.weight", "2.weight", "5.weight"]
    twin = copy.deepcopy(net)
    align(twin, weights(learner))
    expected = backprop(twin, x, y)
    learner.backward(x, y)
    assert_same(left(net), expected)
    own = FA().attach(copy.deepcopy(net), blocks=["2"], feedback={n: net.get_parameter(n) for n in weights(learner)})
    own.network.zero_grad()
    own.backward(x, y)
    assert_same(left(own.network), backprop(net, x, y))


def linear_states(run, **modules):
    """Make a network that runs ``run`` on its states, with its own parameters."""
    return Rewired(run, **modules).double()


class Weight(nn.Module):
    """A bare parameter used as ``use`` says."""

    def __init__(self, use, *shape, bias=False):
        super().__init__()
        self.weight = nn.Parameter(draw(*(shape or (D, D)), seed=3))
        self.bias = nn.Parameter(draw(D, seed=4)) if bias else None
        self.use = use

    def forward(self, h):
        return self.use(h, self.weight)


@pytest.mark.parametrize(
    "use",
    [
        lambda h, w: h @ w,
        lambda h, w: torch.matmul(h, w),
        lambda h, w: h.mm(w),
        lambda h, w: torch.mm(h, w),
        lambda h, w: h.matmul(w),
        lambda h, w: F.linear(h, w),
        lambda h, w: F.linear(input=h, weight=w, bias=None),
        lambda h, w: torch.matmul(h, other=w),
        lambda h, w: torch.mm(h, mat2=w),
    ],
)
def test_functions_on_a_parameter(use):
    net = Net(lambda: Weight(use)).double()
    x, y = vectors(N, torch.Generator().manual_seed(0)), labels()
    learner = FA().attach(net, blocks=["blocks.0", "blocks.1"], example=x)
    B = weights(learner)
    assert {"blocks.0.weight", "blocks.1.weight"} <= B.keys()
    twin = copy.deepcopy(net)
    align(twin, {name: matrix for name, matrix in B.items() if "blocks" not in name})
    for l, block in enumerate(twin.blocks):
        block.use = lambda h, w, l=l: through(use, h, w, B[f"blocks.{l}.weight"])
    expected = backprop(twin, x, y)
    learner.backward(x, y)
    assert_same(left(net), expected)


def test_a_weight_of_two_maps_has_one_matrix():
    shared = nn.Linear(D, D)

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = shared

        def forward(self, h):
            return self.a(torch.tanh(self.a(h)))

    net = nn.Sequential(nn.Linear(7, D), Twice(), nn.Linear(D, CLASSES)).double()
    x, y = vectors(N, torch.Generator().manual_seed(0)), labels()
    learner = FA().attach(net, blocks=["1"], example=x)
    twin = copy.deepcopy(net)
    align(twin, weights(learner))
    expected = backprop(twin, x, y)
    learner.backward(x, y)
    assert_same(left(net), expected)


def test_embeddings_norms_positions_and_scales_are_no_maps():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.a = nn.LayerNorm([TOKENS, D]), nn.Linear(D, D)
            self.scale = nn.Parameter(torch.ones(1, 1, D))

        def forward(self, h):
            return h + self.scale * self.a(self.norm(h))

    class Tokens(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(11, D)
            self.pos = nn.Parameter(draw(1, TOKENS - 1, D))
            self.cls = nn.Parameter(draw(1, 1, D))
            self.block, self.head = Block(), nn.Linear(D, CLASSES)

        def forward(self, ids):
            h = self.embed(ids[:, 1:]) + self.pos
            h = torch.cat([self.cls.expand(len(ids), -1, -1), h], 1)
            return self.head(self.block(h)[:, 0])

    net = Tokens().double()
    ids = torch.randint(11, (N, TOKENS), generator=torch.Generator().manual_seed(0))
    learner = FA().attach(net, blocks=["block"], example=ids)
    assert [*weights(learner)] == ["block.a.weight", "head.weight"]
    twin = copy.deepcopy(net)
    align(twin, weights(learner))
    expected = backprop(twin, ids, labels())
    learner.backward(ids, labels())
    assert_same(left(net), expected)


def test_learned_queries_enter_a_map_like_any_activation():
    """What enters a map may be a parameter: the map sends δ back to it, through its own matrix."""

    class Pool(nn.Module):
        def __init__(self):
            super().__init__()
            self.queries = nn.Parameter(draw(2, D))
            self.q, self.k, self.v = nn.Linear(D, D), nn.Linear(D, D), nn.Linear(D, D)

        def forward(self, h):
            scores = self.q(self.queries) @ self.k(h).mT
            return scores.softmax(-1) @ self.v(h)

    net = nn.Sequential(nn.Linear(7, D), Pool(), nn.Flatten(), nn.Linear(2 * D, CLASSES)).double()
    x, y = draw(N, TOKENS, 7), labels()
    learner = FA().attach(net, blocks=["1"], example=x)
    twin = copy.deepcopy(net)
    align(twin, weights(learner))
    expected = backprop(twin, x, y)
    learner.backward(x, y)
    assert_same(left(net), expected)


# --- refusals ---------------------------------------------------------------------------------------------------------


class Cell(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.cell = kind(D, D)

    def forward(self, h):
        return self.cell(h)


class Recurrent(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.rnn = kind(D, D, batch_first=True)

    def forward(self, h):
        return self.rnn(h[:, None])[0][:, 0]


class Attends(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(D, 2, batch_first=True)

    def forward(self, h):
        return self.attention(h[:, None], h[:, None], h[:, None])[0][:, 0]


class Bilinear(nn.Module):
    def __init__(self):
        super().__init__()
        self.both = nn.Bilinear(D, D, D)

    def forward(self, h):
        return self.both(h, h)


def masked(h, w):
    return F.linear(h, w * torch.ones_like(w).tril())


def standardised(h, w):
    return h @ ((w - w.mean()) / w.std())


def into_zeros(h, w):
    padded = torch.zeros_like(h)
    padded[:, 1:] = h[:, 1:]
    return padded @ w.T


OPAQUE = {
    "rnn": (lambda: Recurrent(nn.RNN), "rnn.weight_ih_l0"),
    "lstm": (lambda: Recurrent(nn.LSTM), "rnn.weight_ih_l0"),
    "gru": (lambda: Recurrent(nn.GRU), "rnn.weight_ih_l0"),
    "rnn-cell": (lambda: Cell(nn.RNNCell), "cell.weight_ih"),
    "gru-cell": (lambda: Cell(nn.GRUCell), "cell.weight_ih"),
    "attention": (Attends, "attention.in_proj_weight"),
    "bilinear": (Bilinear, "both.weight"),
    "weight-norm": (lambda: parametrizations.weight_norm(nn.Linear(D, D)), "parametrizations.weight.original"),
    "spectral-norm": (lambda: parametrizations.spectral_norm(nn.Linear(D, D)), "parametrizations.weight.original"),
    "orthogonal": (lambda: parametrizations.orthogonal(nn.Linear(D, D)), "parametrizations.weight.original"),
    "pruned": (lambda: prune.l1_unstructured(nn.Linear(D, D), "weight", 0.5), "weight_orig"),
    "masked": (lambda: Weight(masked), "weight"),
    "standardised": (lambda: Weight(standardised), "weight"),
    "transposed": (lambda: Weight(lambda h, w: h @ w.T), "weight"),
    "transposed-into-linear": (lambda: Weight(lambda h, w: F.linear(h, w.t())), "weight"),
    "weight-first": (lambda: Weight(lambda h, w: (w @ h.T).T), "weight"),
    "einsum": (lambda: Weight(lambda h, w: torch.einsum("bi,oi->bo", h, w)), "weight"),
    "addmm": (lambda: Weight(lambda h, w: torch.addmm(torch.zeros(D, dtype=h.dtype), h, w)), "weight"),
    "addmm-transposed": (lambda: Weight(lambda h, w: torch.addmm(torch.zeros(D, dtype=h.dtype), h, w.t())), "weight"),
    "tensordot": (lambda: Weight(lambda h, w: torch.tensordot(h, w, 1)), "weight"),
    "tensordot-transposed": (lambda: Weight(lambda h, w: torch.tensordot(h, w.T, 1)), "weight"),
    "inner": (lambda: Weight(lambda h, w: torch.inner(h, w)), "weight"),
    "baddbmm": (lambda: Weight(lambda h, w: torch.bmm(h[None], w[None])[0]), "weight"),
    "vector": (lambda: Weight(lambda h, w: h * (h @ w)[:, None], D), "weight"),
    "vector-einsum": (lambda: Weight(lambda h, w: h * torch.einsum("bi,i->b", h, w)[:, None], D), "weight"),
    "flat": (lambda: Weight(lambda h, w: h @ w.view(D, D), D * D), "weight"),
    "stacked": (lambda: Weight(lambda h, w: h @ w[0], 2, D, D), "weight"),
    "vmap": (lambda: Weight(lambda h, w: torch.vmap(lambda row: w @ row)(h)), "weight"),
    "written": (lambda: Weight(into_zeros), "weight"),
}


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("kind", OPAQUE)
@pytest.mark.parametrize("embedded", [False, True], ids=["", "integers"])
def test_what_no_mode_can_see_is_refused_by_name(kind, embedded):
    make, weight = OPAQUE[kind]
    stem = nn.Embedding(11, D) if embedded else nn.Linear(7, D)
    net = nn.Sequential(stem, make(), nn.Linear(D, CLASSES)).double()
    x = torch.arange(N) if embedded else draw(N, 7)
    learner = FA().attach(net, blocks=["1"])
    with untouched(net), pytest.raises(UsageError) as caught:
        learner.backward(x, labels())
    message = str(caught.value)
    assert message.startswith("weight-level FA cannot reach '1."), message
    assert weight in message
    assert message.endswith("write it with nn.Linear or nn.Conv, or use FA(level='block') or DFA")
    assert learner.credits is not None


def test_a_custom_function_is_refused():
    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx, h, w):
            ctx.save_for_backward(h, w)
            return h @ w.t()

        @staticmethod
        def backward(ctx, delta):
            h, w = ctx.saved_tensors
            return delta @ w, delta.t() @ h

    net = nn.Sequential(nn.Linear(7, D), Weight(Product.apply), nn.Linear(D, CLASSES)).double()
    with pytest.raises(UsageError, match=r"weight-level FA cannot reach '1.weight'"):
        FA().attach(net, blocks=["1"], example=draw(N, 7))


def test_a_weight_that_is_made_of_activations_is_refused():
    class Hyper(nn.Module):
        def __init__(self):
            super().__init__()
            self.make = nn.Linear(D, D * D)

        def forward(self, h):
            return F.linear(h, self.make(h).mean(0).view(D, D))

    net = nn.Sequential(nn.Linear(7, D), Hyper(), nn.Linear(D, CLASSES)).double()
    with pytest.raises(UsageError, match="'a weight': it is computed from activations before it enters linear"):
        FA().attach(net, blocks=["1"], example=draw(N, 7))


def test_a_weight_that_takes_no_part_is_refused():
    net = nn.Sequential(nn.Linear(7, D), nn.Linear(D, D), nn.Linear(D, CLASSES)).double()
    net.spare = nn.Linear(D, D, bias=False).double()
    net.forward = lambda x: net[2](net[1](net[0](x)))
    with pytest.raises(UsageError, match=r"'spare.weight': it is not seen in the forward pass"):
        FA().attach(net, blocks=["1"], example=draw(N, 7))


def test_finding_the_maps_touches_nothing():
    net = nn.Sequential(
        nn.Linear(7, D), nn.BatchNorm1d(D), nn.Dropout(0.5), nn.Linear(D, D), nn.Linear(D, CLASSES)
    ).double()
    net[0].weight.grad = torch.ones_like(net[0].weight)
    net[3].weight.requires_grad_(False)
    stepped = []
    net[4].weight.register_post_accumulate_grad_hook(lambda p: stepped.append(p))  # an optimiser inside the backward
    with untouched(net):
        learner = FA().attach(net, blocks=["3"], example=draw(N, 7))
    assert not stepped
    assert [*weights(learner)] == ["0.weight", "3.weight", "4.weight"]
    learner.backward(draw(N, 7), labels())
    assert len(stepped) == 1
    assert net[3].weight.grad is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_under_autocast_a_map_is_as_backprop_has_it(dtype):
    net = nn.Sequential(nn.Linear(7, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, CLASSES))
    x, y = draw(N, 7).float(), labels()
    own = {name: p.detach() for name, p in net.named_parameters() if p.ndim > 1}
    learner = FA().attach(net, blocks=["2"], example=x, feedback=own)
    with torch.autocast("cpu", dtype):
        learner.backward(x, y)
        found = left(net)
        net.zero_grad()
        loss = F.cross_entropy(net(x).float(), y)
    loss.backward()
    for name, p in net.named_parameters():
        assert found[name].dtype == torch.float32
        assert torch.allclose(found[name], p.grad, rtol=0.05, atol=2e-3), name
