"""Files and folders as they come: indexes, leftovers, FP8 blocks under another name, and what is broken or hostile."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from padless import layouts
from padless.checkpoints import Checkpoint, from_compressed_tensors, from_deepseek, from_torch
from padless.formats import FP8_BLOCK, MXFP4, NVFP4
from padless.quantization.quantize import dequantize, quantize

safetensors = pytest.importorskip("safetensors.torch")
INDEX = "model.safetensors.index.json"


def codes(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def save(path: Path, **tensors: torch.Tensor) -> None:
    safetensors.save_file({name: t.clone() for name, t in tensors.items()}, path)


def write_index(folder: Path, content: Any, name: str = INDEX) -> None:
    (folder / name).write_text(content if isinstance(content, str) else json.dumps(content))


# --- folders ---------------------------------------------------------------------------------------------


def test_the_index_says_which_file_counts(tmp_path: Path) -> None:
    """A file left over from another save has the same names, and comes last in the alphabet."""
    right, stale = torch.arange(4.0), torch.full((4,), 9.0)
    save(tmp_path / "model-00001-of-00002.safetensors", a=right, b=right + 1)
    save(tmp_path / "model-00002-of-00002.safetensors", c=right + 2, b=stale)
    save(tmp_path / "old.safetensors", a=stale, c=stale, d=stale)
    first, second = (f"model-0000{i}-of-00002.safetensors" for i in (1, 2))
    write_index(tmp_path, {"metadata": {}, "weight_map": {"a": first, "b": first, "c": second}})
    with Checkpoint(tmp_path) as checkpoint:
        for i, name in enumerate("abc"):
            assert torch.equal(checkpoint.tensor(name), right + i)
        assert "d" not in checkpoint


def test_links_are_followed(tmp_path: Path) -> None:
    """The hub's cache keeps a folder of links to files elsewhere."""
    (tmp_path / "blobs").mkdir()
    folder = tmp_path / "snapshot"
    folder.mkdir()
    save(tmp_path / "blobs" / "0123", a=torch.ones(2))
    (folder / "model.safetensors").symlink_to(tmp_path / "blobs" / "0123")
    write_index(folder, {"weight_map": {"a": "model.safetensors"}})
    with Checkpoint(folder) as checkpoint:
        assert checkpoint.tensor("a").tolist() == [1.0, 1.0]


def test_without_an_index_a_name_must_be_in_one_file(tmp_path: Path) -> None:
    save(tmp_path / "one.safetensors", a=torch.ones(2))
    save(tmp_path / "two.safetensors", b=torch.ones(2))
    assert "a" in Checkpoint(tmp_path)
    save(tmp_path / "two.safetensors", a=torch.zeros(2))
    with pytest.raises(ValueError, match=r"^source has 'a' in both one.safetensors and two.safetensors, and no index"):
        Checkpoint(tmp_path)


BAD_INDEXES: dict[str, tuple[Any, str]] = {
    "above": ({"weight_map": {"a": "../secret.safetensors"}}, "must be the name of a file in the folder"),
    "below": ({"weight_map": {"a": "sub/a.safetensors"}}, "must be the name of a file in the folder"),
    "absolute": ({"weight_map": {"a": "/etc/passwd"}}, "must be the name of a file in the folder"),
    "backslash": ({"weight_map": {"a": "..\\a.safetensors"}}, "must be the name of a file in the folder"),
    "empty": ({"weight_map": {"a": ""}}, "must be the name of a file in the folder"),
    "dots": ({"weight_map": {"a": ".."}}, "must be the name of a file in the folder"),
    "missing file": ({"weight_map": {"a": "b.safetensors"}}, "names b.safetensors, which is not in"),
    "missing name": (
        {"weight_map": {"a": "model.safetensors", "z": "model.safetensors"}},
        r"with 'z' in model.safetensors, where it is not \(1 of 2 names are missing\)",
    ),
    "no map": ({}, "whose weight_map must be an object of file names"),
    "a list": ([1], "whose weight_map must be an object of file names"),
    "numbers": ({"weight_map": {"a": 1}}, "whose weight_map must be an object of file names"),
    "no JSON": ("{", "an index that cannot be read, model.safetensors.index.json"),
    "not UTF-8": (None, "an index that cannot be read"),
}


@pytest.mark.parametrize("name", BAD_INDEXES)
def test_a_bad_index_gets_a_sentence(name: str, tmp_path: Path) -> None:
    content, message = BAD_INDEXES[name]
    folder = tmp_path / "folder"
    folder.mkdir()
    save(tmp_path / "secret.safetensors", a=torch.ones(2))
    save(folder / "model.safetensors", a=torch.ones(2))
    if content is None:
        (folder / INDEX).write_bytes(b"\xff\xfe{}")
    else:
        write_index(folder, content)
    with pytest.raises(ValueError, match=f"^source has .*{message}"):
        Checkpoint(folder)


def test_two_indexes_are_refused(tmp_path: Path) -> None:
    for name in (INDEX, "other.safetensors.index.json"):
        write_index(tmp_path, {"weight_map": {}}, name)
    with pytest.raises(ValueError, match=r"^source has 2 indexes, model.safetensors.index.json, other"):
        Checkpoint(tmp_path)


# --- files -----------------------------------------------------------------------------------------------


def header(described: object, data: bytes = b"") -> bytes:
    text = json.dumps(described).encode()
    return len(text).to_bytes(8, "little") + text + data


BROKEN: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda whole: b"",
    "cut in the header": lambda whole: whole[:20],
    "cut in the data": lambda whole: whole[:-3],
    "longer": lambda whole: whole + b"\0",
    "a huge header": lambda whole: (2**62).to_bytes(8, "little") + whole[8:],
    "no JSON": lambda whole: (4).to_bytes(8, "little") + b"{{{{",
    "a shape that does not multiply out": lambda whole: header(
        {"a": {"dtype": "F32", "shape": [5], "data_offsets": [0, 16]}}, bytes(16)
    ),
    "a shape that overflows": lambda whole: header(
        {"a": {"dtype": "F32", "shape": [2**40, 2**40], "data_offsets": [0, 16]}}, bytes(16)
    ),
    "offsets past the end": lambda whole: header(
        {"a": {"dtype": "U8", "shape": [64], "data_offsets": [0, 64]}}, bytes(16)
    ),
    "an unknown dtype": lambda whole: header({"a": {"dtype": "F7", "shape": [4], "data_offsets": [0, 16]}}, bytes(16)),
    "a pickle": lambda whole: b"\x80\x04\x95" + bytes(100),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_file_gets_a_sentence(name: str, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save(path, a=torch.arange(4.0))
    path.write_bytes(BROKEN[name](path.read_bytes()))
    for source in (path, tmp_path):
        with pytest.raises(ValueError, match=r"^source has model.safetensors, which is no whole .safetensors file: "):
            Checkpoint(source)


def test_a_mapping_holds_tensors() -> None:
    with pytest.raises(ValueError, match=r"^source\['a'\] must be a torch.Tensor, got int"):
        Checkpoint({"a": 3})  # type: ignore[dict-item]


@pytest.mark.parametrize("pattern", ["{}{}", "{name}", "{"])
def test_a_pattern_has_one_place(pattern: str) -> None:
    with pytest.raises(ValueError, match=r"^pattern is '.*'; it must have one \{\}, for the expert"):
        Checkpoint({}).experts(pattern, 2)


# --- conventions -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_fp8_blocks_of_compressed_tensors(dtype: torch.dtype) -> None:
    """The names of ModelOpt's FP4, codes of e4m3 and a scale for each 128 x 128."""
    w = quantize(torch.randn(200, 272), FP8_BLOCK, kind="weight")
    scale = w.scale.to(dtype)
    t = Checkpoint({"up.weight": w.data, "up.weight_scale": scale}).weight("up")
    assert t.format is FP8_BLOCK
    assert torch.equal(t.scale, scale.float())
    assert torch.equal(t.data.view(torch.uint8), w.data.view(torch.uint8))


@pytest.mark.parametrize("shape", [(), (1,), (200, 1), (200,), (1, 272)])
def test_other_scales_of_fp8_are_named_as_what_they_are(shape: tuple[int, ...]) -> None:
    w = quantize(torch.randn(200, 272), FP8_BLOCK, kind="weight")
    message = r"^scale is torch.float32 \(.*\) beside e4m3 .*allowed: one for each 128 x 128, \(2, 3\).*not supported$"
    with pytest.raises(ValueError, match=message):
        Checkpoint({"up.weight": w.data, "up.weight_scale": torch.ones(shape)}).weight("up")


@pytest.mark.parametrize("shape", [(64, 16), (16, 64), (1, 1024), (1024, 1), (8, 128), (256, 4)])
def test_as_many_bytes_are_not_enough_to_be_tiles(shape: tuple[int, ...]) -> None:
    packed, scale = codes(128, 128), codes(128, 8, seed=1) % 255
    want = dequantize(from_torch(packed, scale))
    tiles = layouts.to_blocked(scale.view(torch.float8_e8m0fnu)).view(torch.uint8)
    for right in (tiles, tiles.view(32, 32)):
        assert torch.equal(dequantize(from_torch(packed, right)), want)
    with pytest.raises(ValueError, match=r"^scale must have shape \(128, 8\), or be 32x4x4 tiles of shape \(1024,\)"):
        from_torch(packed, tiles.view(shape))


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf")])
def test_an_encode_scale_that_cannot_be_is_refused(scale: float) -> None:
    packed, blocks = codes(4, 8), codes(4, 1).view(torch.float8_e4m3fn)
    with pytest.raises(ValueError, match=r"^global_scale is \[.*\]; an encode scale must be positive and finite"):
        from_compressed_tensors(packed, blocks, torch.tensor([scale]))
    stacked = [t.expand(2, *t.shape) for t in (packed, codes(4, 1))]
    with pytest.raises(ValueError, match=r"^global_scale is"):
        from_compressed_tensors(
            stacked[0], stacked[1].contiguous().view(torch.float8_e4m3fn), torch.tensor([1.0, scale])
        )


@pytest.mark.parametrize("described", ["[1]", "3", '"text"', "{", "null"])
def test_metadata_that_is_no_object_gets_a_sentence(described: str, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    tensors = {"a._weight_qdata": codes(4, 8), "a._weight_scale": codes(4, 1).view(torch.float8_e4m3fn)}
    safetensors.save_file(tensors, path, metadata={"a.weight": described})
    with (
        Checkpoint(path) as checkpoint,
        pytest.raises(ValueError, match=r"^name is 'a', whose metadata must be a JSON"),
    ):
        checkpoint.weight("a")


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8, torch.float64, torch.float8_e4m3fn])
def test_scales_of_a_wrong_dtype_are_refused(dtype: torch.dtype) -> None:
    weight = codes(128, 128).view(torch.float8_e4m3fn)
    with pytest.raises(
        ValueError, match=r"^scale_inv must be float32, bfloat16, float16 or float8_e8m0fnu, got torch\."
    ):
        from_deepseek(weight, torch.ones(1, 1).to(dtype))


WRONG_PARTS: dict[str, tuple[dict[str, torch.Tensor], str]] = {
    "codes of int8": ({"a.weight": codes(8, 8).view(torch.int8), "a.weight_scale": codes(8, 1)}, "data must be"),
    "codes of bf16": ({"a.weight": torch.zeros(8, 8).bfloat16(), "a.weight_scale": codes(8, 1)}, "data must be"),
    "deepseek in bf16": (
        {"a.weight": torch.zeros(8, 8).bfloat16(), "a.weight_scale_inv": torch.ones(1, 1)},
        "weight must be float8_e4m3fn",
    ),
    "a vector": ({"a.weight": codes(8), "a.weight_scale": codes(8)}, "data must be"),
    "four dimensions": ({"a.weight_packed": codes(1, 1, 8, 8), "a.weight_scale": codes(1, 1, 8, 1)}, "packed must be"),
    "scales of other rows": ({"a.weight_packed": codes(8, 16), "a.weight_scale": codes(7, 1)}, "scale must have"),
    "blocks of 8": ({"a_blocks": codes(8, 2, 8), "a_scales": codes(8, 2)}, "blocks must be uint8"),
    "blocks and scales that differ": ({"a_blocks": codes(8, 2, 16), "a_scales": codes(8, 3)}, "scale must have"),
    "global scales of other groups": (
        {
            "a.weight": codes(2, 8, 8),
            "a.weight_scale": codes(2, 8, 1).view(torch.float8_e4m3fn),
            "a.weight_scale_2": torch.ones(3),
        },
        "global_scale must be one value or one per group",
    ),
}


@pytest.mark.parametrize("name", WRONG_PARTS)
def test_parts_that_do_not_belong_together_get_a_sentence(name: str) -> None:
    tensors, message = WRONG_PARTS[name]
    with pytest.raises(ValueError, match=f"^{message}"):
        Checkpoint(tensors).weight("a")


def test_what_was_right_still_is() -> None:
    for fmt in (NVFP4, MXFP4):
        w = quantize(torch.randn(2, 130, 64), fmt, kind="weight", scale_layout="blocked")
        t = from_torch(w.data, w.scale, w.global_scale)
        assert torch.equal(dequantize(t), dequantize(w))
