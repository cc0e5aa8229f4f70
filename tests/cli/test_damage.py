"""Damaged and foreign files: one line, exit code 2, nothing unpickled, no traceback."""

import json
import shutil
import zipfile

import flax.serialization
import numpy as np
import pytest
import safetensors.numpy

from sparsity.cli import checkpoints, main
from tests.cli.checkpoints import FORMATS, weights
from tests.properties.strategies import EXAMPLES, FIRST

FILES = ["a.safetensors", "a.npz", "a.msgpack"]


@pytest.fixture(params=FILES)
def saved(request, tmp_path):
    path = tmp_path / request.param
    FORMATS[request.param][0](path, weights())
    return path


def code_and_error(capsys, path):
    code = main(["inspect", str(path), "--json"])
    return code, capsys.readouterr().err


def test_a_file_that_is_cut_off_is_damaged(saved, capsys):
    data = saved.read_bytes()
    for length in [0, 1, 7, 8, 9, *np.linspace(10, len(data) - 1, 25, dtype=int)]:
        saved.write_bytes(data[:length])
        code, error = code_and_error(capsys, saved)
        assert code == 2, length
        assert error.startswith(f"sparsity: error: {saved} cannot be read: ")
        assert error.count("\n") == 1


def damage(rng, data):
    """Returns bytes with a few flips, cuts, runs of one byte, swaps, insertions or deletions."""
    damaged = bytearray(data)
    for _ in range(rng.integers(1, 4)):
        if not damaged:
            break
        # Headers are short and stand in front; an archive has them in its end, too.
        start = int(rng.integers(min(len(damaged), 700)))
        places = [start, len(damaged) - 1 - start, int(rng.integers(len(damaged)))]
        at, other = places[rng.integers(3)], int(rng.integers(len(damaged)))
        n = int(rng.integers(1, 32))
        one, two = damaged[at : at + n], damaged[other : other + n]
        match rng.integers(6):
            case 0:
                damaged[at] = rng.integers(256)
            case 1:
                damaged[at : at + n] = bytes([rng.choice([0, 9, 57, 127, 255])]) * n
            case 2:
                damaged[at : at + n], damaged[other : other + n] = two, one
            case 3:
                damaged[at:at] = two
            case 4:
                del damaged[at : at + n]
            case 5:
                del damaged[max(at, 1) :]
    return bytes(damaged)


@pytest.mark.drawn(10_000)
@pytest.mark.parametrize("name", FILES)
def test_damaged_bytes_end_in_one_line_and_leave_other_files_alone(tmp_path, capsys, name):
    rng, codes = np.random.default_rng(FIRST), set()
    source, target = tmp_path / name, tmp_path / f"target{(tmp_path / name).suffix}"
    FORMATS[name][0](source, weights())
    files = {
        file: file.read_bytes()
        for file in ([source] if source.is_file() else source.rglob("*"))
        if file.is_file()
    }
    (tmp_path / "other").write_bytes(b"bytes of another file")
    for number in range(EXAMPLES or 40):
        damaged = list(files)[rng.integers(len(files))]
        damaged.write_bytes(damage(rng, files[damaged]))
        command = ["inspect", str(source)]
        if number % 4 == 0:
            command = ["prune", str(source), str(target), "--sparsity", "0.5"]
        code, error = main(command), capsys.readouterr().err
        assert error.count("sparsity: error: ") == error.count("\n") == (code == 2)
        assert target.exists() == (command[0] == "prune" and code == 0)
        assert (tmp_path / "other").read_bytes() == b"bytes of another file"
        assert len(list(tmp_path.iterdir())) == 2 + target.exists()
        if target.exists():
            assert main(["inspect", str(target)]) == 0
            target.unlink() if target.is_file() else shutil.rmtree(target)
        damaged.write_bytes(files[damaged])
        codes.add(code)
    assert 2 in codes
    assert codes <= {0, 2}


class Bomb:
    """Creates a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (self.path, "w")


def test_pickles_are_never_read(tmp_path, capsys):
    trace = tmp_path / "was_unpickled"
    path = tmp_path / "a.npz"
    np.savez(path, w=np.array([Bomb(str(trace))], object))
    code, error = code_and_error(capsys, path)
    assert code == 2
    assert "dtype object holds no numbers" in error
    with zipfile.ZipFile(path, "w") as archive:  # as torch saves
        archive.writestr("archive/data.pkl", b"\x80\x02.")
    assert "holds no numbers" in code_and_error(capsys, path)[1]
    assert not trace.exists()


@pytest.mark.parametrize("dtype", ["V2", "U5", "M8[s]"])
def test_what_holds_no_numbers_is_refused(tmp_path, capsys, dtype):
    np.savez(tmp_path / "a.npz", w=np.zeros(3, dtype))
    code, error = code_and_error(capsys, tmp_path / "a.npz")
    assert code == 2
    assert "'w': dtype" in error
    assert "holds no numbers" in error


def test_an_error_shows_what_a_terminal_would_obey(capsys):
    assert main(["inspect", "red\x1b[31m.npz"]) == 2
    assert capsys.readouterr().err.startswith(r"sparsity: error: red\x1b[31m.npz does not exist")


def test_an_unknown_dtype_of_safetensors_is_named(tmp_path, capsys):
    path = tmp_path / "a.safetensors"
    safetensors.numpy.save_file({"w": np.ones(2, np.float32)}, path)
    path.write_bytes(path.read_bytes().replace(b'"F32"', b'"F31"'))
    assert "'w' has the unknown dtype 'F31'" in code_and_error(capsys, path)[1]


ENTRY = {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}
HEADERS = {
    "negative offsets": {"w": ENTRY | {"data_offsets": [-16, 0]}},
    "offsets behind the end": {"w": ENTRY | {"data_offsets": [16, 32]}},
    "an end before its start": {"w": ENTRY | {"data_offsets": [16, 0]}},
    "arrays that overlap": {"v": ENTRY, "w": ENTRY | {"data_offsets": [8, 24]}},
    "arrays in one place": {"v": ENTRY, "w": ENTRY},
    "a hole before an array": {"w": ENTRY | {"data_offsets": [4, 20]}},
    "bytes that are of no array": {"w": ENTRY | {"shape": [2], "data_offsets": [0, 8]}},
    "a size that lies": {"w": ENTRY | {"shape": [5]}},
    "a size beyond all": {"w": ENTRY | {"shape": [2**33, 2**33]}},
    "a negative size": {"w": ENTRY | {"shape": [-2, -2]}},
    "a size that is a float": {"w": ENTRY | {"shape": [4.0]}},
    "a size that is a boolean": {"w": ENTRY | {"shape": [True, 4]}},
    "three offsets": {"w": ENTRY | {"data_offsets": [0, 16, 16]}},
    "metadata that is no text": {"__metadata__": {"a": 1}, "w": ENTRY},
    "zeros behind it": json.dumps({"w": ENTRY}) + "\0\0",
    "a list": "[]",
    "a deep list": '{"w":' + "[" * 100_000,
}


def write_header(path, header, size, length=None):
    text = (header if isinstance(header, str) else json.dumps(header)).encode()
    length = len(text) if length is None else length
    path.write_bytes(length.to_bytes(8, "little") + text + bytes(size))


@pytest.mark.parametrize("name", HEADERS)
def test_a_header_that_the_format_forbids_is_refused_before_anything_is_written(
    tmp_path, capsys, name
):
    path = tmp_path / "a.safetensors"
    for size in (16, 20, 24):  # of which one fits the offsets, if any
        write_header(path, HEADERS[name], size)
        target = tmp_path / "b.safetensors"
        for command in (["inspect", path], ["prune", path, target, "--sparsity", "0.5"]):
            assert main([*map(str, command)]) == 2
            error = capsys.readouterr().err
            assert error.startswith(f"sparsity: error: {path} cannot be read: ")
            assert error.count("\n") == 1
        assert not target.exists()


@pytest.mark.parametrize("length", [1 << 20, 10**9, 2**63, 2**64 - 1])
def test_a_header_longer_than_its_file_is_refused(tmp_path, capsys, length):
    write_header(tmp_path / "a.safetensors", {"w": ENTRY}, 16, length)
    code, error = code_and_error(capsys, tmp_path / "a.safetensors")
    assert (code, error.count("\n")) == (2, 1)


def member(shape, data=bytes(64), version=(1, 0)):
    """Returns a file .npy of float32 with this shape in its header."""
    text = f"{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}}}\n".encode()
    length = len(text).to_bytes(2 if version == (1, 0) else 4, "little")
    return b"\x93NUMPY" + bytes(version) + length + text + data


MEMBERS = {
    "a negative shape": ([("w.npy", member((-4, -4)))], "can only specify one unknown"),
    "a boolean shape": ([("w.npy", member((True, 16)))], "an integer is required"),
    "fewer bytes": ([("w.npy", member((4, 5)))], "expected 80 bytes got 64"),
    "terabytes": ([("w.npy", member((1 << 40,)))], "Unable to allocate"),
    "another version": ([("w.npy", member((4, 4), version=(9, 9)))], "not (9, 9)"),
    "no header": ([("w.npy", b"\x93NUMPY\x01\x00")], "EOF"),
    "a folder": ([("d/", b""), ("w.npy", member((4, 4)))], "'d/' holds no numbers"),
}


@pytest.mark.parametrize("name", MEMBERS)
def test_members_that_lie_are_refused(tmp_path, capsys, name):
    members, message = MEMBERS[name]
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
        for file, data in members:
            archive.writestr(file, data)
    code, error = code_and_error(capsys, tmp_path / "a.npz")
    assert (code, error.count("\n")) == (2, 1)
    assert message in error


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_a_damaged_member_is_one_line_in_every_command(tmp_path, capsys, save):
    path, target = tmp_path / "a.npz", tmp_path / "b.npz"
    save(path, w=np.ones((4, 4)), x=np.random.default_rng(0).normal(size=1000))
    with zipfile.ZipFile(path) as archive:
        place = archive.getinfo("x.npy").header_offset + 4000
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)
    prune = ["prune", path, target, "--sparsity", "0.5", "--filter", "w"]  # x is copied only
    for command in (["inspect", path], ["diff", path, path], prune, prune[:-2]):
        assert main([*map(str, command)]) == 2
        printed = capsys.readouterr()
        assert "Bad CRC-32 for file 'x.npy'" in printed.err or f"{path} cannot be" in printed.err
        assert printed.err.count("\n") == 1
        assert [file.name for file in tmp_path.iterdir()] == ["a.npz"]


def test_a_signalling_nan_is_no_warning(tmp_path):
    values = np.array([0x7F81, 0xFF81], np.uint16).view("bfloat16")
    safetensors.numpy.save_file({"w": values}, tmp_path / "a.safetensors")
    assert main(["inspect", str(tmp_path / "a.safetensors")]) == 0
    assert main(["diff", *[str(tmp_path / "a.safetensors")] * 2]) == 0


def test_leaves_of_one_name_are_refused(tmp_path, capsys):
    tree = {"a": {"b": np.ones(2)}, "a/b": np.ones(3)}
    (tmp_path / "a.msgpack").write_bytes(flax.serialization.msgpack_serialize(tree))
    code, error = code_and_error(capsys, tmp_path / "a.msgpack")
    assert code == 2
    assert "'a/b' comes twice" in error


def test_an_error_of_any_library_is_one_line(tmp_path, capsys, monkeypatch):
    def fail(path, key):
        raise KeyError("a library's own")

    np.savez(tmp_path / "a.npz", w=np.ones(2))
    monkeypatch.setattr(checkpoints, "read_by_name", fail)
    code, error = code_and_error(capsys, tmp_path / "a.npz")
    assert (code, error) == (2, 'sparsity: error: "a library\'s own"\n')


def test_a_filter_that_no_library_takes_is_one_line(tmp_path, capsys):
    np.savez(tmp_path / "a.npz", w=np.ones(2))
    assert main(["inspect", str(tmp_path / "a.npz"), "--filter", "w{99999999999}"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_an_unknown_format_lists_the_known_ones(tmp_path, capsys):
    path = tmp_path / "model.pt"
    path.write_bytes(b"anything")
    code, error = code_and_error(capsys, path)
    assert code == 2
    assert "Known are files that end in .safetensors, .npz, .msgpack, and folders of Orbax" in error


def test_a_folder_that_is_no_checkpoint_says_which_is(tmp_path, capsys):
    code, error = code_and_error(capsys, tmp_path)
    assert code == 2
    assert "name the folder of an item, such as STEP/default" in error
