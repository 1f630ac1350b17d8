"""Quantized Hugging Face folders: each weight is read as its format's documentation defines it.

The folders are packed here, element by element. The values were compared with those of bitsandbytes
0.50.2, GPTQModel, AutoAWQ 0.2.9 and compressed-tensors 0.20.1, and are equal.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from nemo_aligner.checkpoint.hf.convert import convert_hf_to_nemo
from nemo_aligner.checkpoint.hf.source import open_source
from nemo_aligner.checkpoint.nemo.archive import open_nemo
from nemo_aligner.models.quantized import NF4_VALUES
from tests.checkpoint.hf.exporting import config_of, edit, edit_tensors
from tests.checkpoint.refusals import Damages, check_damages
from tests.harness import families

SIZES = {"hidden_size": 128, "intermediate_size": 96}
GROUP = 32
NAME = "model.layers.1.mlp.down_proj"
# From the documentation of bitsandbytes: the codes of fp4 without the sign, before scaling to 1.
FP4_VALUES = [0.0, 0.0625, 8.0, 12.0, 4.0, 6.0, 2.0, 3.0]
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]
Stored = dict[str, Tensor]
Draw = Callable[[int, int], tuple[Stored, Tensor]]


def integers(*size: int, below: int) -> Tensor:
    return torch.randint(0, below, size, dtype=torch.int64)


def words(values: Tensor, bits: int, axis: int, order: list[int] | None = None) -> Tensor:
    """Pack ``values`` along ``axis``; ``order`` lists the values of a word from its low bits on."""
    per_word = 32 // bits
    packed = torch.zeros_like(values.unflatten(axis, (-1, per_word)).select(axis + 1, 0))
    for place, source in enumerate(order or range(per_word)):
        packed |= values.unflatten(axis, (-1, per_word)).select(axis + 1, source) << bits * place
    return (packed - (packed >> 31 << 32)).to(torch.int32)


def draw_4_bits(kind: str, rows: int, columns: int, *, is_nested: bool) -> tuple[Stored, Tensor]:
    count, block, nested_block = rows * columns, 64, 256
    codes, num_blocks = integers(count, below=16), -(-count // block)
    table = torch.tensor(NF4_VALUES)
    if kind == "fp4":
        table = torch.tensor(FP4_VALUES + [-value for value in FP4_VALUES]) / 12
    absmax = torch.rand(num_blocks) + 0.1
    state: dict[str, Any] = {"quant_type": kind, "blocksize": block, "shape": [rows, columns]}
    state["dtype"] = "bfloat16"
    stored = {"weight.absmax": absmax, "weight.quant_map": table}
    if is_nested:
        nested_table, scale_codes = torch.rand(256) - 0.5, integers(num_blocks, below=256)
        largest = torch.rand(-(-num_blocks // nested_block))
        place = torch.arange(num_blocks) // nested_block
        absmax = nested_table[scale_codes] * largest[place] + 0.75
        state |= {"nested_blocksize": nested_block, "nested_offset": 0.75}
        stored |= {
            "weight.absmax": scale_codes.to(torch.uint8),
            "weight.nested_absmax": largest,
            "weight.nested_quant_map": nested_table,
        }
    text = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
    stored |= {
        "weight": (codes[::2] * 16 + codes[1::2]).to(torch.uint8)[:, None],
        f"weight.quant_state.bitsandbytes__{kind}": text,
    }
    weight = table[codes] * absmax[torch.arange(count) // block]
    return stored, weight.view(rows, columns).bfloat16()


def draw_int8(rows: int, columns: int) -> tuple[Stored, Tensor]:
    weight, largest = integers(rows, columns, below=255) - 127, torch.rand(rows)
    stored = {"weight": weight.to(torch.int8), "SCB": largest}
    stored["weight_format"] = torch.tensor(0, dtype=torch.uint8)
    return stored, (weight * largest[:, None] / 127).bfloat16()


def draw_gptq(
    rows: int, columns: int, *, bits: int = 4, version: int = 1, group: int = GROUP, index: str = ""
) -> tuple[Stored, Tensor]:
    groups = columns // group
    values, zeros = (integers(size, rows, below=1 << bits) for size in (columns, groups))
    zeros[0] = 0  # the first version stores -1, which borrows from the next zero point
    scales = (0.01 * torch.rand(groups, rows) + 0.01).half()
    group_of_input = torch.arange(columns) // group
    if index == "act":
        group_of_input = group_of_input[torch.randperm(columns)]
    one = sum(1 << place for place in range(0, 32, bits))
    stored = {
        "qweight": words(values, bits, 0),
        "qzeros": words(zeros, bits, 1) - (one if version == 1 else 0),
        "scales": scales,
    }
    if index != "missing":
        stored["g_idx"] = group_of_input.int()
    weight = (values - zeros[group_of_input]) * scales.float()[group_of_input]
    return stored, weight.t().bfloat16()


def draw_awq(rows: int, columns: int) -> tuple[Stored, Tensor]:
    groups = columns // GROUP
    values, zeros = (integers(size, rows, below=16) for size in (columns, groups))
    scales = (0.01 * torch.rand(groups, rows) + 0.01).half()
    stored = {
        "qweight": words(values, 4, 1, AWQ_ORDER),
        "qzeros": words(zeros, 4, 1, AWQ_ORDER),
        "scales": scales,
    }
    place = torch.arange(columns) // GROUP
    return stored, ((values - zeros[place]) * scales.float()[place]).t().bfloat16()


def draw_packed(
    rows: int, columns: int, *, bits: int = 4, is_symmetric: bool = True, index: bool = False
) -> tuple[Stored, Tensor]:
    half, groups = 1 << bits - 1, columns // GROUP
    values, zeros = (integers(rows, size, below=2 * half) - half for size in (columns, groups))
    scales = (0.01 * torch.rand(rows, groups) + 0.01).bfloat16()
    stored = {
        "weight_packed": words(values + half, bits, 1),
        "weight_scale": scales,
        "weight_shape": torch.tensor([rows, columns]),
    }
    if is_symmetric:
        zeros.zero_()
    else:
        stored["weight_zero_point"] = words(zeros + half, bits, 0)
    place = torch.arange(columns) // GROUP
    if index:
        place = place[torch.randperm(columns)]
        stored["weight_g_idx"] = place.int()
    return stored, ((values - zeros[:, place]) * scales.float()[:, place]).bfloat16()


def draw_fp8(rows: int, columns: int, block: tuple[int, int]) -> tuple[Stored, Tensor]:
    block = (block[0] or rows, block[1] or columns)
    weight = torch.randn(rows, columns).to(torch.float8_e4m3fn)
    scales = torch.rand(-(-rows // block[0]), -(-columns // block[1])).bfloat16()
    row, column = torch.arange(rows) // block[0], torch.arange(columns) // block[1]
    dense = (weight.float() * scales.float()[row[:, None], column]).bfloat16()
    is_single = block == (rows, columns)
    scale = scales.flatten() if is_single else scales
    return {"weight": weight, "weight_scale": scale, "input_scale": scales[0, 0]}, dense


def bnb(**options: Any) -> dict[str, Any]:
    return {"quant_method": "bitsandbytes", **options}


def gptq(**options: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": 4, "group_size": GROUP, **options}


def awq(**options: Any) -> dict[str, Any]:
    return {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", **options}


def compressed(format: str = "pack-quantized", **weights: Any) -> dict[str, Any]:
    kind = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
    groups = {"group_0": {"targets": ["Linear"], "weights": {**kind, **weights}}}
    return {"quant_method": "compressed-tensors", "format": format, "config_groups": groups}


def fp8(strategy: str, **weights: Any) -> dict[str, Any]:
    kind = {"num_bits": 8, "type": "float", "strategy": strategy, **weights}
    return compressed("float-quantized", **kind)


NF4 = bnb(load_in_4bit=True, bnb_4bit_quant_type="nf4", llm_int8_skip_modules=["lm_head"])
INT8 = bnb(load_in_8bit=True, llm_int8_skip_modules=None)
CASES: dict[str, tuple[dict[str, Any], Draw]] = {
    "nf4": (NF4, partial(draw_4_bits, "nf4", is_nested=False)),
    "nf4_nested": (NF4, partial(draw_4_bits, "nf4", is_nested=True)),
    "fp4": (bnb(load_in_4bit=True), partial(draw_4_bits, "fp4", is_nested=False)),
    "fp4_nested": (bnb(load_in_4bit=True), partial(draw_4_bits, "fp4", is_nested=True)),
    "int8": (INT8, draw_int8),
    "int8_without_method": ({"load_in_8bit": True}, draw_int8),
    "gptq": (gptq(), draw_gptq),
    "gptq_8_v2": (gptq(bits=8, checkpoint_format="gptq_v2"), partial(draw_gptq, bits=8, version=2)),
    "gptq_8": (gptq(bits=8, dynamic={"-:lm_head": {}}), partial(draw_gptq, bits=8)),
    "gptq_2": (gptq(bits=2, checkpoint_format="gptq"), partial(draw_gptq, bits=2)),
    "gptq_act": (gptq(desc_act=True), partial(draw_gptq, index="act")),
    "gptq_no_index": (gptq(), partial(draw_gptq, index="missing")),
    "awq": (awq(zero_point=True, modules_to_not_convert=["proj", "lm_head"]), draw_awq),
    "awq_names": (
        {"quant_method": "awq", "w_bit": 4, "q_group_size": GROUP, "version": "GEMM"},
        draw_awq,
    ),
    "packed": (compressed(), draw_packed),
    "packed_8": (
        compressed(num_bits=8, symmetric=False),
        partial(draw_packed, bits=8, is_symmetric=False),
    ),
    "packed_4": (compressed(symmetric=False), partial(draw_packed, is_symmetric=False, index=True)),
    "fp8_tensor": (fp8("tensor"), partial(draw_fp8, block=(0, 0))),
    "fp8_channel": (fp8("channel"), partial(draw_fp8, block=(1, 0))),
    "fp8_block": (fp8("block", block_structure=[40, 48]), partial(draw_fp8, block=(40, 48))),
}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plain") / "hf"
    families.write_hf_checkpoint(folder, "llama", **SIZES)
    file = folder / "model.safetensors"
    tensors = {name: tensor.bfloat16() for name, tensor in load_file(file).items()}
    save_file(tensors, file, metadata={"format": "pt"})
    edit(folder, dtype="bfloat16")
    return folder


def write(plain: Path, folder: Path, case: str) -> Stored:
    """Write ``plain`` with random quantized projections; return all tensors dequantized."""
    torch.manual_seed(0)
    settings, draw = CASES[case]
    expected = load_file(plain / "model.safetensors")
    tensors = dict(expected)
    for name in [name for name in expected if "_proj" in name]:
        stored, expected[name] = draw(*tensors.pop(name).shape)
        module = name.removesuffix("weight")
        tensors |= {f"{module}{part}": tensor for part, tensor in stored.items()}
    folder.mkdir()
    for file in plain.glob("*.json"):
        (folder / file.name).write_bytes(file.read_bytes())
    contiguous = {name: tensor.contiguous().clone() for name, tensor in tensors.items()}
    save_file(contiguous, folder / "model.safetensors", metadata={"format": "pt"})
    edit(folder, quantization_config=settings)
    return expected


@pytest.mark.parametrize("case", CASES)
def test_a_quantized_weight_is_read_as_its_format_defines(
    case: str, plain: Path, tmp_path: Path
) -> None:
    expected = write(plain, tmp_path / "hf", case)
    source = open_source(tmp_path / "hf")
    assert source.tensors.keys() == expected.keys()
    for name, tensor in source.tensors.items():
        read = tensor.read()
        assert (tuple(read.shape), read.dtype) == (tensor.shape, tensor.dtype)
        assert torch.equal(read, expected[name]), name
    (note,) = source.notes
    assert note.startswith("dequantised: 28 tensors of ")
    assert note.endswith("), to bf16")
    assert "quantization_config" not in source.config


def test_a_dtype_that_the_config_lacks_is_that_of_the_scales(plain: Path, tmp_path: Path) -> None:
    for case, dtype in (
        ("awq", torch.float16),
        ("int8", torch.float16),
        ("packed", torch.bfloat16),
    ):
        write(plain, tmp_path / case, case)
        edit(tmp_path / case, dtype=None)
        assert open_source(tmp_path / case).tensors[f"{NAME}.weight"].dtype is dtype


def test_a_quantized_folder_is_converted_like_its_dequantized_weights(
    plain: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "hf"
    expected = write(plain, folder, "nf4_nested")
    summary = str(convert_hf_to_nemo(folder, tmp_path / "nf4.nemo"))
    assert "dequantised: 28 tensors of nf4 (bitsandbytes), to bf16" in summary
    # Merging QLoRA may leave quantization_config in the config of weights that are dense again.
    save_file(expected, folder / "model.safetensors", metadata={"format": "pt"})
    assert "dequantised" not in str(convert_hf_to_nemo(folder, tmp_path / "plain.nemo"))
    with open_nemo(tmp_path / "nf4.nemo") as ours, open_nemo(tmp_path / "plain.nemo") as dense:
        assert ours.store.tensors == dense.store.tensors
        for name in dense.store.tensors:
            assert torch.equal(ours.store.read(name), dense.store.read(name)), name


# Options that are not supported, by the case that they change.
OPTIONS: list[tuple[str, dict[str, Any], str]] = [
    ("nf4", {"quant_method": "hqq"}, "'hqq'.* supported with the quant_method bitsandbytes, gptq"),
    ("nf4", {"quant_method": "mxfp4"}, "mxfp4 only for gpt-oss"),
    ("nf4", {"quant_method": ["gptq"]}, "supported with the quant_method"),
    ("nf4", {"load_in_8bit": True}, "got load_in_8bit=True, wanted False"),
    ("nf4", {"load_in_4bit": False}, "got load_in_8bit=False, wanted True"),
    ("nf4", {"bnb_4bit_quant_type": "af4"}, "bnb_4bit_quant_type='af4', wanted 'nf4' or 'fp4'"),
    ("nf4", {"bnb_4bit_quant_storage": "bfloat16"}, "bnb_4bit_quant_storage='bfloat16'"),
    ("nf4", {"llm_int8_skip_modules": ["down_proj"]}, "down_proj.weight: it is quantized, but"),
    ("awq", {"modules_to_not_convert": ["model.layers.1"]}, r"layers\.1\..* lists the module"),
    ("awq", {"modules_to_not_convert": "lm_head"}, "wanted a list of modules' names"),
    ("awq", {"version": "gemv"}, "version='gemv', wanted 'gemm'"),
    ("awq", {"bits": 8}, "bits=8, wanted 4"),
    ("awq", {"zero_point": False}, "zero_point=False, wanted True"),
    ("awq", {"backend": "llm-awq"}, "backend='llm-awq'"),
    ("gptq", {"bits": 3}, "bits=3, wanted 2 or 4 or 8"),
    ("gptq", {"bits": True}, "bits=True"),
    ("gptq", {"group_size": 0}, "group_size=0, wanted a positive number"),
    ("gptq", {"checkpoint_format": "marlin"}, "checkpoint_format='marlin', wanted 'gptq'"),
    ("gptq", {"dynamic": {"+:.*down.*": {"bits": 8}}}, "sets options of single modules"),
    ("packed", {"format": "marlin-24"}, "format='marlin-24', wanted 'pack-quantized' or"),
    ("packed", {"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme="),
    ("packed", {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse-24-bitmask"),
    ("packed", {"sparsity_config": 3}, "sparsity_config=3, wanted a mapping"),
    ("packed", {"config_groups": {}}, "config_groups={}, wanted groups"),
    ("packed", {"config_groups": compressed(num_bits=3)["config_groups"]}, "num_bits=3, wanted 4"),
    ("packed", {"config_groups": compressed(strategy="tensor")["config_groups"]}, "'tensor'"),
    ("fp8_block", {"config_groups": fp8("block")["config_groups"]}, "block_structure=None"),
]


def test_other_methods_and_options_are_rejected_by_name(plain: Path, tmp_path: Path) -> None:
    for case in sorted({case for case, _, _ in OPTIONS}):
        folder = tmp_path / case
        write(plain, folder, case)
        settings = config_of(folder)["quantization_config"]
        damages = [
            (partial(edit, quantization_config={**settings, **changes}), pattern)
            for changed, changes, pattern in OPTIONS
            if changed == case
        ]
        check_damages(folder, damages, open_source)


def test_a_weight_whose_tensors_do_not_fit_is_one_clear_error(plain: Path, tmp_path: Path) -> None:
    state = f"{NAME}.weight.quant_state.bitsandbytes__nf4"

    def change(**parts: Tensor | None) -> Callable[[Path], None]:
        names = {part.replace("__", "."): tensor for part, tensor in parts.items()}
        return partial(
            edit_tensors, changes={f"{NAME}.{part}": tensor for part, tensor in names.items()}
        )

    def change_state(**fields: Any) -> Callable[[Path], None]:
        good = {"shape": [128, 96], "dtype": "bfloat16", "blocksize": 64}
        text = json.dumps({**good, **fields}).encode()
        return partial(edit_tensors, changes={state: torch.tensor(list(text), dtype=torch.uint8)})

    no_json: dict[str, Tensor | None] = {state: torch.tensor([7], dtype=torch.uint8)}
    byte, word = torch.uint8, torch.int32
    cases: dict[str, Damages] = {
        "nf4": [
            (partial(edit_tensors, changes=no_json), "bitsandbytes__nf4: it is not JSON"),
            (partial(edit_tensors, changes={state: None}), "weight: got torch.uint8 without"),
            (change_state(shape=[128, 95]), r"weight: got torch.uint8 \[6144, 1\], wanted"),
            (change_state(shape="128"), "shape='128' and dtype='bfloat16', wanted a list"),
            (change_state(shape=[-128, -96]), r"shape=\[-128, -96\]"),
            (change_state(dtype="int4"), "dtype='int4'"),
            (change_state(blocksize=0), "blocksize=0, wanted a positive number"),
            (change(weight__absmax=None), r"weight\.absmax: got none, wanted .* \[192\]"),
            (change(weight__absmax=torch.ones(192, dtype=byte)), "absmax: got torch.uint8"),
        ],
        "nf4_nested": [
            (change_state(nested_blocksize=256), "nested_offset=None, wanted a finite number"),
            (change(weight__nested_absmax=torch.ones(2)), r"nested_absmax: got .* \[2\], wanted"),
        ],
        "int8": [
            (change(SCB=None), "weight: got torch.int8 without the other tensors"),
            (change(SCB=torch.ones(96)), r"SCB: got torch.float32 \[96\], wanted .* \[128\]"),
            (change(weight_format=torch.tensor(2, dtype=byte)), r"got \[2\], wanted 0 \(row"),
        ],
        "gptq": [
            (change(qzeros=None), "qzeros: got none"),
            (change(weight=torch.ones(128, 96)), "weight: .* has it quantized and unquantized"),
            (change(scales=torch.ones(4, 128)), r"scales: got torch.float32 \[4, 128\]"),
            (change(qweight=torch.ones(12, dtype=word)), r"qweight: got torch.int32 \[12\]"),
        ],
        "packed": [
            (change(weight_shape=torch.tensor([128, 200])), r"weight_packed: got .*\[128, 12\]"),
            (
                change(weight_zero_point=torch.ones(16, 3, dtype=word)),
                "zero_point: got torch.int32",
            ),
        ],
    }
    for case, damages in cases.items():
        write(plain, tmp_path / case, case)
        check_damages(tmp_path / case, damages, open_source)


def test_values_that_only_reading_shows_are_checked(plain: Path, tmp_path: Path) -> None:
    write(plain, tmp_path / "hf", "gptq")

    def read(folder: Path) -> None:
        open_source(folder).tensors[f"{NAME}.weight"].read()

    index, scales = torch.full((96,), 3, dtype=torch.int32), torch.full((3, 128), 6e4).half()
    damages: Damages = [
        (
            partial(edit_tensors, changes={f"{NAME}.g_idx": index}),
            "groups from 3 to 3, wanted 0 to 2",
        ),
        (partial(edit_tensors, changes={f"{NAME}.scales": scales}), "NaN or infinite in float16"),
    ]
    edit(tmp_path / "hf", dtype="float16")
    check_damages(tmp_path / "hf", damages, read)
