"""Files that are given as data and cannot be read: what they are, and what to do with them."""

from __future__ import annotations

from pathlib import Path

from nemo_aligner.config.packaged import install_command

_WANTED = "wanted JSON lines, one JSON list, or a table"
# The first bytes of a file -> what it is, and how pandas reads it, if it does.
_BINARY = {
    b"PAR1": ("a Parquet file", "read_parquet({path!r})"),
    b"ARROW1": ("an Arrow file", "read_feather({path!r})"),
    b"PK\x03\x04": ("a zip archive (a spreadsheet is one, too)", None),
    b"\x28\xb5\x2f\xfd": ("a file compressed by zstd", None),
    b"\xfd7zXZ\x00": ("a file compressed by xz", None),
    b"BZh": ("a file compressed by bzip2", None),
}


def describe_binary(content: bytes, path: str) -> str | None:
    """What the content is by its first bytes, for an error; None for what may be text.

    A Parquet or an Arrow file is only told of where pyarrow is not installed.
    """
    for start, (kind, reader) in _BINARY.items():
        if not content.startswith(start):
            continue
        if reader is None:
            return f"got {kind}, {_WANTED}: unpack it"
        return f"got {kind}, which pyarrow reads: {_install_or_convert(reader, path)}"
    return None


def _install_or_convert(reader: str, path: str) -> str:
    target = str(Path(path).with_suffix(".jsonl"))
    if target == path:
        target = str(Path(path).with_suffix(".converted.jsonl"))
    return (
        f"{install_command('tables')} brings it, or convert it by this line of Python, with "
        f"pandas: import pandas; pandas.{reader.format(path=path)}"
        f'.to_json({target!r}, orient="records", lines=True)'
    )
