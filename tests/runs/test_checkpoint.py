import json
import math

import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st

from creditscope.errors import UsageError
from creditscope.runs import StorageError, checkpoint
from tests.runs.disks import longest_file, small_disk

DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.complex64,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.bool,
]  # fmt: skip


@pytest.fixture
def path(tmp_path):
    return tmp_path / "last.safetensors"


@pytest.fixture
def saved(path):
    checkpoint.save(path, {"w": torch.arange(100.0), "b": torch.ones(3, dtype=torch.int64)}, {"epoch": 3})
    return path


def bits(tensor):
    return tensor.dtype, tensor.shape, tensor.contiguous().reshape(-1).view(torch.uint8).tolist()


def loaded(path):
    found = checkpoint.load(path)
    assert found is not None
    return found


def random_bits(dtype, shape):
    """Return a tensor of any bits there are: NaNs of every kind among them."""
    size = math.prod(shape) * dtype.itemsize
    noise = torch.randint(0, 2 if dtype == torch.bool else 256, (size,), dtype=torch.uint8)
    return noise.view(dtype).reshape(shape)


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,), (4, 5)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_bit_of_every_dtype(path, dtype, shape):
    tensor = random_bits(dtype, shape)
    checkpoint.save(path, {"t": tensor}, {})
    tensors, _ = loaded(path)
    assert bits(tensors["t"]) == bits(tensor)
    tensors["t"].zero_()  # memory of its own, that can be written


@given(
    st.dictionaries(
        st.text(st.characters(exclude_categories=["Cs"]), max_size=5).filter(lambda name: name != "__metadata__"),
        st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 3), max_size=3)),
        max_size=4,
    ),
    st.dictionaries(st.text(max_size=3), st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3)),
)
def test_what_goes_in_comes_out(tmp_path_factory, layout, meta):
    path = tmp_path_factory.mktemp("checkpoint") / "a.safetensors"
    tensors = {name: random_bits(dtype, tuple(shape)) for name, (dtype, shape) in layout.items()}
    checkpoint.save(path, tensors, meta)
    found, text = loaded(path)
    assert {name: bits(tensor) for name, tensor in found.items()} == {name: bits(t) for name, t in tensors.items()}
    assert json.dumps(text) == json.dumps(meta)


def test_shared_strided_expanded_and_trained_tensors(path):
    base = torch.arange(12.0).reshape(3, 4)
    tensors = {
        "base": base,
        "tied": base,
        "view": base[1:],
        "transposed": base.T,
        "channels last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "expanded": torch.ones(1, 3).expand(4, 3),
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "conjugate": torch.tensor([1 + 2j]).conj(),
        "graph": torch.ones(2, requires_grad=True) * 2,
    }
    before = {name: tensor.detach().clone() for name, tensor in tensors.items()}
    checkpoint.save(path, tensors, {})
    found, _ = loaded(path)
    for name, tensor in before.items():
        assert torch.equal(found[name], tensor.resolve_conj()), name
        assert found[name].is_contiguous()
        assert not found[name].requires_grad
        assert torch.equal(tensors[name].detach(), tensor)


def test_two_savings_have_the_same_bytes(saved, tmp_path):
    again = tmp_path / "again.safetensors"
    checkpoint.save(again, *loaded(saved))
    assert again.read_bytes() == saved.read_bytes()


def test_any_reader_of_safetensors_opens_it(saved):
    assert torch.equal(safetensors.torch.load_file(saved)["w"], torch.arange(100.0))


def test_none_where_there_is_none(path):
    assert checkpoint.load(path) is None


def refusal(path):
    with pytest.raises(UsageError) as caught:
        checkpoint.load(path)
    line = str(caught.value)
    assert line.startswith(f"{path} is ")
    assert "\n" not in line
    return line


def test_cut_short_anywhere(saved):
    data = saved.read_bytes()
    for length in [0, 1, 7, 8, 9, 100, len(data) // 2, len(data) - 1]:
        saved.write_bytes(data[:length])
        assert "corrupt or cut short" in refusal(saved)


def test_one_bit_altered_anywhere(saved):
    data, digest, refused = saved.read_bytes(), checkpoint.digest(loaded(saved)[0], '{"epoch": 3}'), 0
    for place in range(len(data)):
        altered = bytearray(data)
        altered[place] ^= 1
        saved.write_bytes(bytes(altered))
        try:
            tensors, meta = loaded(saved)
        except UsageError as error:
            refused += str(error).startswith(f"{saved} is ")
        else:  # nothing that counts: the digit of the version
            assert checkpoint.digest(tensors, json.dumps(meta)) == digest
    assert refused > len(data) - 10


@pytest.mark.parametrize("data", [b"junk", b"\0" * 64, b"PK\x03\x04" + b"\0" * 60, b"\xff" * 64])
def test_no_safetensors_file(path, data):
    path.write_bytes(data)
    assert "corrupt or cut short" in refusal(path)


def test_more_than_was_saved(saved):
    saved.write_bytes(saved.read_bytes() + b"x")
    assert "corrupt or cut short" in refusal(saved)


@pytest.mark.parametrize("header", [None, {"format": "pt"}, {"creditscope": "{}"}])
def test_a_safetensors_file_of_others(path, header):
    path.write_bytes(safetensors.torch.save({"w": torch.ones(2)}, header))
    assert "is not from creditscope" in refusal(path)


def resaved(path, **changes):
    """Write the tensors of a checkpoint again, with another header."""
    tensors, meta = loaded(path)
    digest = checkpoint.digest(tensors, json.dumps(meta))
    header = {"format": checkpoint.FORMAT, "version": 1, "meta": meta, "sha256": digest, **changes}
    kept = json.dumps({name: value for name, value in header.items() if value is not None})
    path.write_bytes(safetensors.torch.save(tensors, {"creditscope": kept}))


def test_the_same_header_is_read(saved):
    resaved(saved)
    assert loaded(saved)[1] == {"epoch": 3}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"version": 2}, "in format 2 of a newer creditscope"),
        ({"version": None}, "it has no format version"),
        ({"meta": {"epoch": 4}}, "its contents are not those that were saved"),
        ({"meta": None}, "its contents are not those that were saved"),
        ({"sha256": None}, "its contents are not those that were saved"),
    ],
)
def test_a_header_that_does_not_belong(saved, changes, message):
    resaved(saved, **changes)
    assert message in refusal(saved)


@pytest.mark.parametrize("text", ["", "{", "[]", "1"])
def test_a_header_that_is_no_json_object(saved, text):
    saved.write_bytes(safetensors.torch.save(loaded(saved)[0], {"creditscope": text}))
    assert "corrupt or cut short" in refusal(saved)


def test_a_disk_that_takes_a_part_leaves_the_checkpoint(saved):
    with longest_file(4096), pytest.raises(StorageError, match="cannot be written"):
        checkpoint.save(saved, {"w": torch.zeros(10_000)}, {"epoch": 4})
    assert loaded(saved)[1] == {"epoch": 3}
    assert list(saved.parent.iterdir()) == [saved]


def test_a_full_disk_leaves_the_checkpoint(tmp_path):
    path = tmp_path / "last.safetensors"
    with small_disk(tmp_path, "64k"):
        checkpoint.save(path, {"w": torch.ones(10)}, {"epoch": 3})
        with pytest.raises(StorageError, match=r"/last\.safetensors cannot be written: the disk is full$"):
            checkpoint.save(path, {"w": torch.zeros(100_000)}, {"epoch": 4})
        assert loaded(path)[1] == {"epoch": 3}
        assert list(tmp_path.iterdir()) == [path]
