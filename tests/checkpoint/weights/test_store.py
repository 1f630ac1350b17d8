"""Saved weights are read back bit-identical; requests that do not fit are refused by name."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core import dist_checkpointing
from torch.distributed.checkpoint import FileSystemWriter

from nemo_aligner.checkpoint.importing import import_checkpoint as import_nemo
from nemo_aligner.checkpoint.weights import open_weights
from nemo_aligner.checkpoint.weights.save import (
    PendingSave,
    copy_tensors,
    frozen_digest,
    put_weights,
    save_weights,
    sharded_weights,
    zero_copy_slice,
)
from nemo_aligner.checkpoint.weights.store import MeanStore, TorchDistStore
from nemo_aligner.models.shapes.head import HeadShape
from nemo_aligner.models.shapes.lora import is_of_adapter
from nemo_aligner.utils.errors import CheckpointError
from tests.checkpoint import foreign
from tests.checkpoint.foreign import zarr_folder
from tests.checkpoint.loading import Tensors, Theirs, check, refuse
from tests.checkpoint.loading import load as load_model
from tests.checkpoint.refusals import check_damages, refusals
from tests.checkpoint.weights.tensors import check_loaded, load, request, sharded
from tests.checkpoint.weights.test_store_index import edited_index
from tests.models.test_lora import LORA, build, perturb

pytestmark = pytest.mark.usefixtures("layout")


def test_mean_of_stores_reads_one_tensor_of_all_before_the_next(tmp_path: Path) -> None:
    """The sums are in float64: in bf16, this mean would be 1."""
    folders = [tmp_path / str(number) for number in range(3)]
    for folder, value in zip(folders, (1.0, 1.0078125, 1.0078125), strict=True):
        save_weights(request(fill=value), folder)
    reads: list[tuple[str, str]] = []

    class Recorded(TorchDistStore):
        def read_into(self, target: torch.Tensor, key: str, offsets: Sequence[int]) -> int:
            reads.append((key, self.folder.name))
            return super().read_into(target, key, offsets)

    mean = MeanStore(list(map(Recorded, folders)))
    state = mean.load(request(fill=0.0, dtype=torch.bfloat16))
    assert {value.dtype for value in state.values()} == {torch.bfloat16}
    assert {float(element) for value in state.values() for element in value.flatten()} == {
        1.0078125
    }
    in_fp32 = mean.load(request(fill=0.0))["model.embedding"]
    assert float(in_fp32[0, 0]) == torch.tensor((1.0 + 2 * 1.0078125) / 3)
    keys = [key for key, _ in reads[::3]]
    assert reads == [(key, folder.name) for key in keys for folder in folders]


def test_store_gives_what_was_saved_and_reads_the_index_once(
    saved: Path, index_reads: list[str]
) -> None:
    check_loaded(load(saved))
    assert index_reads == [str(saved / ".metadata")]
    store = open_weights(saved)
    assert store.tensors == {
        "model.embedding": ((6, 4), torch.float32),
        "model.layers.weight": ((2, 3, 4), torch.float32),
    }
    store.check_data(read=True)
    for layer in range(2):
        tensor = store.read("model.layers.weight", layer)
        torch.testing.assert_close(tensor, request()[f"{layer}.weight"].data)
    store.load(request(fill=0.0))
    assert len(index_reads) == 2
    in_bf16 = load(saved, request(fill=0.0, dtype=torch.bfloat16))["model.embedding"]
    assert (in_bf16.dtype, float(in_bf16[0, 1])) == (torch.bfloat16, 1.5)


def test_store_has_the_format_of_megatron_core_both_ways(tmp_path: Path, saved: Path) -> None:
    expected = request(fill=-1.0)
    del expected["model._extra_state"]
    check_loaded(dist_checkpointing.load(expected, str(saved)))
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    dist_checkpointing.save(request(), str(theirs))
    check_loaded(load(theirs))


def test_store_of_a_padded_vocabulary_may_differ_in_rows(saved: Path) -> None:
    for rows in (5, 8):
        data = torch.full((rows, 4), 7.0)
        embedding = sharded("model.embedding", data, allow_shape_mismatch=True)
        loaded = load(saved, {"model.embedding": embedding})["model.embedding"]
        common = min(rows, 6)
        torch.testing.assert_close(loaded[:common], request()["model.embedding"].data[:common])
        assert not loaded[common:].any()


def test_store_refuses_a_request_that_does_not_fit(saved: Path) -> None:
    names = [f"model.new.{number}" for number in range(8)]
    new = {name: sharded(name, torch.zeros(2)) for name in names}
    other = {"w": sharded("model.layers.weight", torch.zeros(2, 3, 5))}
    with refusals() as refused:
        with refused("missing", r"8 tensors are missing: model\.new\.0, .* and 3 more"):
            load(saved, new)
        with refused("shape", r"layers\.weight: got shape \[2, 3, 4\], wanted \[2, 3, 5\]"):
            load(saved, other)
        with refused("one", r"the tensor model\.new is missing"):
            open_weights(saved).read("model.new")


def test_store_that_lacks_a_part_names_it(saved: Path) -> None:
    def lose(name: str) -> tuple[Callable[[Path], object], str]:
        return lambda folder: (folder / name).unlink(), name

    def lose_chunk(folder: Path) -> None:
        with edited_index(folder) as metadata:
            del metadata.state_dict_metadata["model.layers.weight"].chunks[1]

    def write_common(common: object) -> Callable[[Path], object]:
        return lambda folder: torch.save(common, folder / "common.pt")

    def name_format(name: str) -> Callable[[Path], object]:
        description = json.dumps({"sharded_backend": name, "sharded_backend_version": 1})
        return lambda folder: (folder / "metadata.json").write_text(description)

    damages = [
        *map(lose, (".metadata", "common.pt", "metadata.json")),
        (lose_chunk, r"layers\.weight: its shards overlap or do not cover its shape"),
        (write_common({"model.embedding": 1}), "next to the tensors .*: Duplicate"),
        (write_common([1]), "next to the tensors .*: Duplicate"),
        (name_format("fsdp_dtensor"), "'fsdp_dtensor', wanted 'torch_dist'"),
        (name_format("zarr"), "has the format 'torch_dist'"),
    ]
    check_damages(saved, damages, load)
    lose_chunk(saved)
    with pytest.raises(CheckpointError, match=r"layers\.weight: only a part"):
        open_weights(saved).read("model.layers.weight")


def test_save_in_the_background_writes_its_copies(tmp_path: Path) -> None:
    state, host = request(), []
    live = [entry.data for entry in state.values() if entry.data is not None]
    copy_tensors(state, host)
    pending = PendingSave(state, tmp_path / "weights")
    for tensor in live:
        tensor.zero_()
    pending.finish()
    assert pending.is_written
    check_loaded(load(tmp_path / "weights", request(fill=0.0)))
    memory = [tensor.data_ptr() for tensor in host]
    copy_tensors(request(fill=2.0), host)
    assert [tensor.data_ptr() for tensor in host] == memory
    assert all(bool((tensor == 2.0).all()) for tensor in host)


def test_save_that_fails_in_the_background_is_told_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*unused: Any) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(FileSystemWriter, "write_data", fail)
    pending = PendingSave(request(), tmp_path / "weights")
    message = r"weights: cannot be written: \[Errno 5\] Input/output error$"
    with pytest.raises(CheckpointError, match=message):
        pending.finish()
    assert pending.is_written
    assert not (tmp_path / "weights" / "metadata.json").exists()


def test_save_on_a_full_disk_says_so_and_how_much_is_free(tmp_path: Path) -> None:
    """A full disk is reported with the free space, whichever error torch raises."""
    message = r"cannot be written: (the disk is full|a write was cut off, as by a full disk), with "
    large = {"a": sharded("a", torch.zeros(300, 1000)), "b": sharded("b", torch.zeros(3, 1000))}
    message += r"\d+\.\d [GM]B free there\. Free some"
    cases = (("small", request(), "__0_0.distcp"), ("large", large, "__0_0.distcp"))
    for name, state, file in (*cases, ("common", {**request(), "plain": [1]}, "common.pt")):
        folder = tmp_path / name
        folder.mkdir()
        (folder / file).symlink_to("/dev/full")
        with pytest.raises(CheckpointError, match=f"{name}: {message}"):
            PendingSave(state, folder).finish()
        assert not (folder / "metadata.json").exists()


def test_save_clones_no_part_of_flat_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flat = torch.arange(60.0)
    parts = {f"part_{index}": flat[20 * index :][:20].view(4, 5) for index in range(3)}
    cloned = []
    clone = torch.Tensor.clone
    monkeypatch.setattr(torch.Tensor, "clone", lambda self: cloned.append(self) or clone(self))
    save_weights({key: sharded(key, part) for key, part in parts.items()}, tmp_path / "weights")
    assert not cloned
    monkeypatch.undo()
    loaded = load(tmp_path / "weights", {key: sharded(key, torch.zeros(4, 5)) for key in parts})
    assert all(torch.equal(loaded[key], part) for key, part in parts.items())


def test_own_storage_is_the_same_memory_and_outlives_its_tensor() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.int64):
        zeros = torch.arange(24).to(dtype)
        part = zeros[6:18].view(3, 4)
        view = zero_copy_slice(part)
        assert view.untyped_storage().size() == part.nbytes
        assert view.data_ptr() == part.data_ptr()
        assert view.dtype is dtype
        assert torch.equal(view, part)
        zeros.zero_()
        assert not view.any()
    view = zero_copy_slice(torch.arange(2**16)[7:])
    taken = [torch.full((2**16,), -1) for _ in range(8)]
    assert len(taken) == 8
    assert torch.equal(view, torch.arange(7, 2**16))
    # Complete tensors and strided views are returned unchanged.
    zeros = torch.zeros(3, 4)
    assert all(
        zero_copy_slice(tensor) is tensor for tensor in (zeros, torch.tensor(1.0), zeros[:, 1])
    )


def test_run_weights_are_those_that_train(layout: Any) -> None:
    """With LoRA only adapters and head are saved, without LoRA everything."""
    model = build(layout, LORA, head=HeadShape(bias=True, mlp_size=8))
    model.rm_head.add_learned_scalars([1.0])
    of_head = {f"model.rm_head.{name}" for name, _ in model.rm_head.named_parameters()}
    assert len(of_head) == 5
    names = set(sharded_weights(model))
    assert of_head < names
    assert all(is_of_adapter(name) for name in names - of_head)
    assert len(names - of_head) == 2 * 4 * 4
    plain = build(layout, None)
    assert {f"model.{name}" for name, _ in plain.named_parameters()} <= set(sharded_weights(plain))


def test_run_weights_that_are_put_back_have_to_be_complete(layout: Any) -> None:
    model, other = build(layout, LORA), build(layout, LORA, seed=6)
    perturb(model)
    state = {f"model.{name}": value.detach() for name, value in model.named_parameters()}
    saved = {name: state[name] for name in sharded_weights(model)}
    frozen = frozen_digest(other)
    put_weights(other, saved, Path("step_1"))
    assert frozen_digest(other) == frozen
    for name, value in other.named_parameters():
        assert torch.equal(value, state[f"model.{name}"]) == (f"model.{name}" in saved), name
    (lost, *_) = (name for name in saved if "linear_in" in name)
    with pytest.raises(CheckpointError, match=f"step_1: not loaded: {lost[6:]}"):
        put_weights(other, {name: saved[name] for name in saved if name != lost}, Path("step_1"))


def test_run_weights_digest_sees_one_bit_of_a_frozen_weight_and_none_of_others(
    layout: Any,
) -> None:
    model = build(layout, LORA, head=HeadShape(bias=True, mlp_size=8))
    model.rm_head.add_learned_scalars([1.0])
    previous = frozen_digest(model)
    perturb(model)
    with torch.no_grad():
        for parameter in model.rm_head.parameters():
            parameter.add_(1)
    assert frozen_digest(model) == previous
    bits = model.decoder.layers[2].mlp.linear_fc1.weight.data.view(torch.int32)
    bits[3, 4] ^= 1
    assert frozen_digest(model) != previous
    bits[3, 4] ^= 1
    first, second = (model.decoder.layers[index].mlp.linear_fc2.weight.data for index in (0, 1))
    original = first.clone()
    first.copy_(second)
    second.copy_(original)
    assert frozen_digest(model) != previous


def test_zarr_is_read_and_imported(
    theirs: Theirs, tensors: Tensors, layout: Any, tmp_path: Path
) -> None:
    pytest.importorskip("zarr")
    pytest.importorskip("ml_dtypes")
    for dtype in (torch.float32, torch.bfloat16):
        cast = {key: tensor.to(dtype) for key, tensor in tensors.items()}
        expected = {key: tensor.float() for key, tensor in cast.items()}
        path, output = theirs(zarr_folder, str(dtype), cast), tmp_path / f"{dtype}.nemo"
        check(load_model(path, layout).model, expected)
        import_nemo(foreign.pack(path, tmp_path / "theirs.nemo", "w"), output)
        check(load_model(output, layout).model, expected)


def test_zarr_that_is_damaged_or_has_no_package_is_refused(
    theirs: Theirs, layout: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    array = Path("model_weights/model.decoder.layers.mlp.linear_fc1.layer_norm_weight")

    def edit_header(**changes: Any) -> Callable[[Path], object]:
        def damage(folder: Path) -> None:
            header = json.loads((folder / array / ".zarray").read_text())
            (folder / array / ".zarray").write_text(json.dumps({**header, **changes}))

        return damage

    damages = [
        (lambda folder: (folder / array / "1.0").unlink(), "chunks|no such file"),
        (lambda folder: (folder / array / "1.0").write_bytes(b"x"), "got 1 bytes"),
        (edit_header(dtype="|O"), "wanted a plain array"),
        (edit_header(filters=[{"id": "pickle"}]), "wanted a plain array"),
        (edit_header(compressor={"id": "pickle"}), "wanted a plain array"),
        (edit_header(shape=[10**9, 64]), "chunks"),
    ]
    source = theirs(zarr_folder)
    check_damages(source, damages, lambda folder: load_model(folder, layout))
    monkeypatch.setitem(sys.modules, "zarr", None)
    refuse(source, layout, r"packages zarr and ml_dtypes \(extra \[zarr\]\)")
